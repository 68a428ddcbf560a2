-- Rows: unpacked cells `c`, their number `n` (which may exceed what this release knows) and the content `b` of a
-- bytes column. An unset cell is false or nil; booleans are 0 and 1. A state holds the rows of one partition as a call sees and changes them; nothing is written before
-- `flush`.

local function unpack_row(def, blob)
  local array, content = blob, nil
  if def.bytes then
    local length = struct.unpack('>I4', blob)
    array, content = string.sub(blob, 5, 4 + length), string.sub(blob, 5 + length)
  end
  local first = string.byte(array, 1)
  local n = first - 0x90
  if first == 0xdc then n = string.byte(array, 2) * 256 + string.byte(array, 3) end
  return { c = cmsgpack.unpack(array), n = n, b = content }
end

-- Packs the first n cells. Holes are filled with false, because a table with holes would become a map. No cell means
-- false: booleans are 0 and 1.
local function pack_array(c, n)
  while n > 0 and not c[n] do
    c[n] = nil
    n = n - 1
  end
  if n == 0 then return '\144' end
  for i = 1, n do
    if c[i] == nil then c[i] = false end
  end
  return cmsgpack.pack(c)
end

local function pack_row(def, row)
  local array = pack_array(row.c, row.n)
  if not def.bytes then return array end
  return struct.pack('>I4', #array) .. array .. (row.c[def.bytes] and row.b or '')
end

local function server_time()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function open_state(tag, now)
  if now == '' then now = server_time() else now = tonumber(now) end
  return { tag = tag, now = now, rows = {}, original = {}, dirty = {}, events = {} }
end

-- Reads rows that the state does not hold yet.
local function fetch(s, t, keys)
  local rows = s.rows[t]
  if rows == nil then rows = {}; s.rows[t] = rows end
  local missing = {}
  for i = 1, #keys do
    local key = keys[i]
    if rows[key] == nil then
      rows[key] = false
      missing[#missing + 1] = key
    end
  end
  for start = 1, #missing, 1000 do
    local stop = math.min(start + 999, #missing)
    local blobs = redis.call('HMGET', s.tag .. ':' .. TABLES[t].name, unpack(missing, start, stop))
    for i = start, stop do
      local blob = blobs[i - start + 1]
      if blob then rows[missing[i]] = { packed = blob } end
    end
  end
end

-- Returns a row that was fetched; nil if there is none.
local function get(s, t, key)
  local row = s.rows[t][key]
  if not row then return nil end
  if row.packed then
    row = unpack_row(TABLES[t], row.packed)
    s.rows[t][key] = row
  end
  return row
end

-- Returns what an index holds for a row: an instant, or the member of a text index; nil if its first column is unset.
local function index_entry(index, c, key)
  local value = c[index.place] or nil
  if value == nil or index.score then return value end
  if index.rank then return value .. '\0' .. hex16(c[index.rank]) .. key end
  return value .. '\0' .. key
end

-- Notes that a row is about to change, with its index entries as they are stored.
local function touch(s, t, key)
  local original = s.original[t]
  if original == nil then original = {}; s.original[t] = original end
  if original[key] ~= nil then return end
  local row, entries = get(s, t, key), false
  if row then
    entries = {}
    for i, index in ipairs(TABLES[t].indexes) do entries[i] = index_entry(index, row.c, key) end
  end
  original[key] = entries
  s.dirty[#s.dirty + 1] = t
  s.dirty[#s.dirty + 1] = key
end

local function put(row, place, value)
  row.c[place] = value
  if place > row.n then row.n = place end
end

local function keys_with_prefix(s, t, prefix)
  local listed = s.tag .. ':' .. TABLES[t].name .. ':k'
  if prefix == '' then return redis.call('ZRANGE', listed, 0, -1) end
  return redis.call('ZRANGEBYLEX', listed, '[' .. prefix, '(' .. string.sub(prefix, 1, -2) .. '\1')
end

-- Names of keys by kind, with the arguments of one command for each.
local function collect(commands, name, a, b)
  local arguments = commands[name]
  if arguments == nil then arguments = {}; commands[name] = arguments end
  arguments[#arguments + 1] = a
  if b ~= nil then arguments[#arguments + 1] = b end
end

local function send(command, commands)
  for name, arguments in pairs(commands) do
    for start = 1, #arguments, 2000 do
      redis.call(command, name, unpack(arguments, start, math.min(start + 1999, #arguments)))
    end
  end
end

-- Histories: the ids of the newest entries of the feed that concern an execution, 8 bytes each. The highest bit of the
-- last two bytes marks a renewal, which makes room first.
local HISTORY = 128

local function shorten(ids)
  local count = #ids / 8
  if count <= HISTORY then return ids end
  for i = 0, count - 2 do
    if string.byte(ids, i * 8 + 7) >= 128 then return string.sub(ids, 1, i * 8) .. string.sub(ids, i * 8 + 9) end
  end
  return string.sub(ids, 9)
end

local function write_events(s, deleted)
  local feed, history = s.tag .. ':f', s.tag .. ':h'
  for start = 1, #s.events, 500 do
    local arguments, keys, ids = { 'a', string.format('%.0f', s.now) }, {}, {}
    for i = start, math.min(start + 499, #s.events) do
      local event = s.events[i]
      arguments[#arguments + 1] = 'e'
      arguments[#arguments + 1] = event.blob
      if ids[event.key] == nil and not deleted[event.key] then keys[#keys + 1] = event.key end
      ids[event.key] = event.renewed and ids[event.key] ~= 0 and 32768 or 0
    end
    local id = redis.call('XADD', feed, '*', unpack(arguments))
    local ms, seq = string.match(id, '(%d+)-(%d+)')
    ms, seq = tonumber(ms), tonumber(seq)
    if #keys > 0 then
      local old, new = redis.call('HMGET', history, unpack(keys)), {}
      for i, key in ipairs(keys) do
        local own = struct.pack('>I4I2I2', math.floor(ms / 65536), ms % 65536, math.min(seq, 32767) + ids[key])
        new[#new + 1] = key
        new[#new + 1] = shorten((old[i] or '') .. own)
      end
      redis.call('HSET', history, unpack(new))
    end
  end
end

-- Writes everything that the call has changed. This must not fail, because nothing is rolled back.
local function flush(s)
  local hset, hdel, zadd, zrem, deleted = {}, {}, {}, {}, {}
  for i = 1, #s.dirty, 2 do
    local t, key = s.dirty[i], s.dirty[i + 1]
    local def, row, old = TABLES[t], s.rows[t][key], s.original[t][key]
    local name = s.tag .. ':' .. def.name
    if row then
      collect(hset, name, key, row.final or pack_row(def, row))
      if def.listed and not old then collect(zadd, name .. ':k', 0, key) end
      for j, index in ipairs(def.indexes) do
        local before, after = old and old[j], index_entry(index, row.c, key)
        if before == false then before = nil end
        if before ~= after then
          local indexed = s.tag .. ':' .. index.name
          if before ~= nil and (after == nil or not index.score) then
            collect(zrem, indexed, index.score and key or before)
          end
          if after ~= nil then
            if index.score then collect(zadd, indexed, score(after), key) else collect(zadd, indexed, 0, after) end
          end
        end
      end
    elseif old then
      collect(hdel, name, key)
      if def.listed then collect(zrem, name .. ':k', key) end
      for j, index in ipairs(def.indexes) do
        if old[j] ~= nil then collect(zrem, s.tag .. ':' .. index.name, index.score and key or old[j]) end
      end
      if def.history then
        collect(hdel, s.tag .. ':h', key)
        deleted[key] = true
      end
    end
  end
  if #s.events > 0 then write_events(s, deleted) end
  send('HDEL', hdel)
  send('ZREM', zrem)
  send('HSET', hset)
  send('ZADD', zadd)
end
