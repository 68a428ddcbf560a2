// The graph of a flow on a canvas: a layered layout, and a drawing of what is in view.

const W = 150, H = 34, DX = 210, DY = 46, SWEEPS = 8, FAR = 0.35;

// Longest path from the left, then barycentre sweeps. Pure: the number of nodes and edges in, places out.
function layout(n, edges) {
  const lists = () => Array.from({length: n}, () => []), out = lists(), into = lists();
  for (const [a, b] of edges) { out[a].push(b); into[b].push(a); }
  const layer = new Int32Array(n), left = into.map(some => some.length), queue = [], layers = [];
  left.forEach((count, i) => count || queue.push(i));
  for (const a of queue) for (const b of out[a]) {
    layer[b] = Math.max(layer[b], layer[a] + 1);
    if (!--left[b]) queue.push(b);
  }
  layer.forEach((l, i) => (layers[l] ??= []).push(i));
  const place = new Float64Array(n), key = new Float64Array(n);
  const settle = nodes => nodes.forEach((node, i) => { place[node] = i - (nodes.length - 1) / 2; });
  layers.forEach(settle);
  for (let sweep = 0; sweep < SWEEPS; sweep++) {
    const near = sweep % 2 ? out : into;
    for (const nodes of sweep % 2 ? layers.toReversed() : layers) {
      for (const node of nodes) {
        let sum = 0;
        for (const other of near[node]) sum += place[other];
        key[node] = near[node].length ? sum / near[node].length : place[node];
      }
      settle(nodes.sort((a, b) => key[a] - key[b] || a - b));
    }
  }
  return {layer, place, layers};
}

async function open(canvas) {
  const opened = [], view = {x: 0, y: 0, scale: 1}, ink = canvas.getContext("2d");
  let labels, nodes, edges, revision, at, focus = 0, due = 0;
  const label = i => labels[nodes[i][0]], x = i => at.layer[i] * DX, y = i => at.place[i] * DY;
  const redraw = () => { due ||= requestAnimationFrame(draw); };
  const load = async () => {
    const data = await (await fetch(`${canvas.dataset.src}?open=${opened}`)).json(), isNew = data.revision !== revision;
    ({labels, nodes, edges, revision} = data);
    if (isNew) { at = layout(nodes.length, edges); focus = 0; }
    redraw();
  };
  const draw = () => {
    due = 0;
    const from = performance.now(), {clientWidth: width, clientHeight: height} = canvas, {scale} = view, far = scale < FAR;
    const style = getComputedStyle(canvas), ratio = devicePixelRatio;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    ink.setTransform(ratio * scale, 0, 0, ratio * scale, ratio * view.x, ratio * view.y);
    ink.font = `12px ${style.fontFamily}`;
    ink.textBaseline = "middle";
    const left = -view.x / scale, right = left + width / scale, top = -view.y / scale, bottom = top + height / scale;
    ink.strokeStyle = style.color;
    ink.globalAlpha = 0.3;
    ink.beginPath();
    for (const [a, b] of edges) {
      const ax = x(a) + W, ay = y(a), bx = x(b), by = y(b);
      if (bx < left || ax > right || Math.max(ay, by) < top || Math.min(ay, by) > bottom) continue;
      ink.moveTo(ax, ay);
      if (far) ink.lineTo(bx, by); else ink.bezierCurveTo(ax + 30, ay, bx - 30, by, bx, by);
    }
    ink.stroke();
    // By colour, since to change it is slow.
    for (const badge of canvas.parentElement.querySelectorAll(".state")) {
      const colour = badge.classList[1];
      ink.globalAlpha = colour === "off" ? 0.5 : 1;
      ink.strokeStyle = ink.fillStyle = getComputedStyle(badge).color;
      for (let i = 0; i < nodes.length; i++) {
        const nx = x(i), ny = y(i) - H / 2;
        if (label(i)[1] !== colour || nx + W < left || nx > right || ny + H < top || ny > bottom) continue;
        if (far) ink.fillRect(nx, ny, W, H);
        else { ink.clearRect(nx, ny, W, H); ink.strokeRect(nx, ny, W, H); ink.fillText(label(i)[0], nx + 8, ny + H / 2); }
      }
    }
    ink.strokeStyle = style.color;
    ink.lineWidth = 3;
    ink.strokeRect(x(focus), y(focus) - H / 2, W, H);
    canvas.dataset.drawMs = (performance.now() - from).toFixed(1);
  };

  const fit = () => {
    const w = at.layers.length * DX, h = Math.max(...at.layers.map(layer => layer.length)) * DY;
    view.scale = Math.min(1, canvas.clientWidth / (w + 40), canvas.clientHeight / (h + 40));
    view.x = (canvas.clientWidth - (w - DX + W) * view.scale) / 2;
    view.y = canvas.clientHeight / 2;
    redraw();
  };
  const zoom = (factor, cx = canvas.clientWidth / 2, cy = canvas.clientHeight / 2) => {
    const scale = Math.min(2, Math.max(0.005, view.scale * factor)), ratio = scale / view.scale;
    Object.assign(view, {scale, x: cx - (cx - view.x) * ratio, y: cy - (cy - view.y) * ratio});
    redraw();
  };
  const enter = i => {
    const member = nodes[i][1];  // the first one of equal siblings
    if (label(i)[3]) { opened.push(member); load(); }
    else location.href = `${canvas.dataset.run}${parseInt(revision)}/${member}`;
  };
  const go = i => {
    focus = i ?? focus;
    canvas.ariaLabel = `${label(focus)[0]}: ${label(focus)[2]}`;
    view.x = canvas.clientWidth / 2 - (x(focus) + W / 2) * view.scale;
    view.y = canvas.clientHeight / 2 - y(focus) * view.scale;
    redraw();
  };
  const along = (from, to) => edges.find(edge => edge[from] === focus)?.[to];
  const beside = step => { const layer = at.layers[at.layer[focus]]; return layer[layer.indexOf(focus) + step]; };
  const keys = {"+": () => zoom(1.3), "-": () => zoom(1 / 1.3), 0: fit, Enter: () => enter(focus),
    ArrowRight: () => go(along(0, 1)), ArrowLeft: () => go(along(1, 0)),
    ArrowDown: () => go(beside(1)), ArrowUp: () => go(beside(-1))};

  const on = (name, act) => canvas.addEventListener(name, act, {passive: false}), fingers = new Map();
  let moved = 0;
  const grip = () => {  // the middle of all fingers, and their spread
    const all = [...fingers.values()], mean = axis => all.reduce((sum, one) => sum + one[axis], 0) / all.length;
    const cx = mean("offsetX"), cy = mean("offsetY");
    return {cx, cy, spread: Math.hypot(all[0].offsetX - cx, all[0].offsetY - cy)};
  };
  on("keydown", event => { if (keys[event.key]) { event.preventDefault(); keys[event.key](); } });
  on("wheel", event => { event.preventDefault(); zoom(Math.exp(-event.deltaY / 400), event.offsetX, event.offsetY); });
  on("pointerdown", event => { fingers.set(event.pointerId, event); canvas.setPointerCapture(event.pointerId); moved = 0; });
  on("pointermove", event => {
    if (!fingers.has(event.pointerId)) return;
    const before = grip();
    fingers.set(event.pointerId, event);
    const {cx, cy, spread} = grip();
    moved += Math.abs(cx - before.cx) + Math.abs(cy - before.cy);
    view.x += cx - before.cx;
    view.y += cy - before.cy;
    zoom(before.spread ? spread / before.spread : 1, cx, cy);
  });
  on("pointerup", event => {
    const px = (event.offsetX - view.x) / view.scale, py = (event.offsetY - view.y) / view.scale;
    const hit = nodes.findIndex((_, i) => px >= x(i) && px <= x(i) + W && Math.abs(py - y(i)) <= H / 2);
    if (moved <= 4 && hit >= 0) enter(hit);
  });
  for (const name of ["pointerup", "pointercancel"]) on(name, event => fingers.delete(event.pointerId));
  addEventListener("resize", redraw);
  document.addEventListener("ff:changed", load);
  await load();
  fit();
  draw();
  canvas.dataset.readyMs = performance.now().toFixed(0);  // since the page was asked for
}
window.ffGraph = {layout};
const canvas = document.querySelector("#graph");
if (canvas) open(canvas);
