// The live parts of the console. Every page works without this file.

// Some browsers have no second argument, which htmx gives.
try { Document.parseHTMLUnsafe?.("", {}); } catch { Document.parseHTMLUnsafe = undefined; }

const $ = (selector, from = document) => from.querySelector(selector);
const $$ = selector => [...document.querySelectorAll(selector)];
const on = (name, act) => document.addEventListener(name, act);

// Ages keep counting; full times show the local time too.
const UNITS = [[864e5, "d"], [36e5, "h"], [6e4, "min"], [1e3, "s"]];
const length = ms => {
  if (ms < 1e3) return `${ms} ms`;
  if (ms < 1e4) return `${(ms / 1e3).toFixed(1)} s`;
  const at = UNITS.findIndex(([size]) => ms >= size), [size, unit] = UNITS[at], [less, lower] = UNITS[at + 1] ?? [];
  const rest = Math.floor(ms % size / less);
  return `${Math.floor(ms / size)} ${unit}${rest ? ` ${rest} ${lower}` : ""}`;
};
const tick = () => {
  const now = Date.now();
  for (const el of $$("time[data-age]")) {
    const at = Date.parse(el.dateTime), text = at > now ? `in ${length(at - now)}` : `${length(now - at)} ago`;
    if (el.textContent !== text) el.textContent = text;
  }
  for (const el of $$("time[data-full]:not([data-local])")) {
    el.dataset.local = "";
    el.title += ` · ${new Date(el.dateTime).toLocaleString()}`;
  }
};
const prepare = () => {
  for (const el of $$("[data-js]")) el.hidden = false;
  here()?.classList.add("here");
  tick();
  followOutput();
};

// The page is asked for again when it may have changed. While it is in use, it waits.
let isAsking, isWanted, source, poll;
const isBusy = () => $("#live input:checked, dialog[open]")
  || !getSelection().isCollapsed && $("#live").contains(getSelection().anchorNode);
const refresh = async () => {
  if (isAsking || !$("#live")?.dataset.about) return;
  isAsking = true;
  try {
    const headers = {"If-None-Match": $("#live").dataset.etag}, signal = AbortSignal.timeout(3e4);
    const answer = await fetch(location.href, {headers, signal});
    if (answer.redirected) return location.reload();
    const text = answer.ok ? await answer.text() : "", waits = text && !isWanted && isBusy();
    $("#stale").hidden = !waits;
    if (!text || waits) return;
    for (const id of ["#live", "#menu"])
      await htmx.swap({text, target: $(id), select: id, swap: "outerMorph", sourceElement: $(id)});
    prepare();
    document.dispatchEvent(new Event("ff:changed"));
  } catch (error) { console.debug(error); } finally { isAsking = isWanted = false; }
};
// A hidden page follows nothing, because a browser has six connections to a server.
const follow = () => {
  source?.close();
  clearTimeout(poll);
  const {about, live: url} = $("#live")?.dataset ?? {};
  if (!about || document.hidden) return;
  source = new EventSource(`${url}?about=${encodeURIComponent(about)}`);
  source.addEventListener("changed", refresh);
  source.onerror = () => {  // where it was refused, the browser does not try again
    if (source.readyState === 2) poll = setTimeout(() => { refresh(); follow(); }, 5000);
  };
};

// Output appears as it is written; the last lines are kept. Each attempt has its own box.
let box, url, frames, lines;
const paint = () => {
  const atEnd = box.scrollTop + box.clientHeight > box.scrollHeight - 40;
  for (const text of lines) box.appendChild(document.createElement("div")).textContent = text;
  lines = [];
  while (box.childElementCount > 5000) box.firstElementChild.remove();
  if (atEnd) box.scrollTop = box.scrollHeight;
};
const followOutput = () => {
  const found = $(".output[data-src]");
  if (!found || found === box) return;
  [box, url, lines] = [found, new URL(found.dataset.src, location), []];
  openOutput();
};
const openOutput = () => {
  frames?.close();
  if (document.hidden || !url) return;
  frames = new EventSource(url);
  frames.addEventListener("frame", event => {
    if (!lines.length) requestAnimationFrame(paint);
    lines.push(JSON.parse(event.data).payload ?? "");
    url.search = `after=${event.lastEventId}`;
  });
  frames.addEventListener("closed", () => { url = frames.close(); });
};
on("visibilitychange", () => { if (!document.hidden) refresh(); follow(); openOutput(); });

// Keys: `g` and a letter go to a page, the others act on the page or the selected row.
const PAGES = {o: "", r: "/runs", a: "/approvals", f: "/flows", l: "/lanes", b: "/budgets", e: "/events", s: "/submit"};
let afterG, row, href;
const areKeysOn = () => localStorage["ff-keys"] !== "off";
const rows = () => $$("tr[data-href]");
const isChosen = one => one.dataset.href === href;  // a change may move a row, or make it that of another run
const here = () => rows().find(one => one === row && isChosen(one)) ?? rows().find(isChosen);
const select = step => {
  const all = rows(), next = all[all.indexOf(here()) + step];
  if (!next) return;
  here()?.classList.remove("here");
  [row, href] = [next, next.dataset.href];
  row.classList.add("here");
  row.scrollIntoView({block: "nearest"});
};
const KEYS = {
  "/": () => $("#find").focus(),
  "?": () => $("#help").showModal(),
  j: () => select(1),
  k: () => select(-1),
  x: () => here() && $("input", here())?.click(),
  e: () => $("#why")?.scrollIntoView(),
  c: () => { const menu = $("#cancel"); if (menu) { menu.open = true; $("input:not([type=hidden])", menu).focus(); } },
};
on("keydown", event => {
  const {key, target} = event;  // perhaps of a dialog that was just closed
  if (event.ctrlKey || event.metaKey || event.altKey || target.closest("input,select,textarea,canvas,dialog[open]")) return;
  if (!areKeysOn() && key !== "?") return;
  if (afterG && key in PAGES) location.href = document.body.dataset.base + PAGES[key];
  else if (key === "Enter" && here() && !target.closest("a,button:not(dialog *),summary")) location.href = href;
  else if (KEYS[key]) { event.preventDefault(); KEYS[key](); }
  afterG = key === "g";
});

const copy = text => {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.body.appendChild(document.createElement("textarea"));  // on plain HTTP
  area.value = text;
  area.select();
  document.execCommand("copy");
  area.remove();
};
const BUTTONS = {
  show: () => { isWanted = true; refresh(); },
  help: KEYS["?"],
  all: button => { for (const box of $$("td.tick input")) box.checked = button.checked; },
  keys: button => {
    localStorage["ff-keys"] = areKeysOn() ? "off" : "on";
    button.textContent = `Switch shortcuts ${areKeysOn() ? "off" : "on"}`;
  },
};
on("click", event => {
  const button = event.target.closest("[data-copy],[data-do]");
  if (button?.dataset.copy) {
    copy($(`#${button.dataset.copy}`).textContent);
    button.textContent = "copied";
  } else if (button) BUTTONS[button.dataset.do]?.(button);
});
on("DOMContentLoaded", () => {
  htmx.config.morphIgnore = ["data-htmx-powered", "open"];  // a menu that is open stays open
  prepare();
  setInterval(tick, 1000);
  follow();
});
