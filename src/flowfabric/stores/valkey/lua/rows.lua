-- Rows: unpacked cells `c`, their number `n` (which may exceed what this release knows) and the content `b` of a
-- bytes column; or `packed`, as they are stored, with the index entries they will have (`entries`, or as `moves` of the
-- entries they had). An unset cell is false or nil; booleans are 0 and 1. A state holds the rows of one partition as a
-- call sees and changes them; nothing is written before `flush`.

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
  return {
    tag = tag, now = now, names = {}, rows = {}, stored = {}, original = {}, dirty = {}, events = {}, instants = {},
    shapes = {}, layouts = {},
    entries = {}, histories = {}, -- entries of the feed that were added, and histories as they were before
  }
end

-- Returns the name of a key of the partition.
local function key_of(s, suffix)
  local name = s.names[suffix]
  if name == nil then name = s.tag .. ':' .. suffix; s.names[suffix] = name end
  return name
end

-- Reads rows that the state does not hold yet.
local function fetch(s, t, keys)
  local rows, stored = s.rows[t], s.stored[t]
  if rows == nil then rows = {}; s.rows[t] = rows end
  if stored == nil then stored = {}; s.stored[t] = stored end
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
    local blobs = redis.call('HMGET', key_of(s, TABLES[t].name), unpack(missing, start, stop))
    for i = start, stop do
      local blob = blobs[i - start + 1]
      if blob then
        rows[missing[i]] = { packed = blob }
        stored[missing[i]] = blob
      end
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

-- Returns where the key begins in a text that begins with so many parts.
local function after_parts(text, parts)
  local start = 1
  for _ = 1, parts do start = string.find(text, '\0', start, true) + 1 end
  return start
end

-- Returns what an index holds for a row: an instant, or the member of a text index; nil if its first column is unset.
local function index_entry(index, c, key)
  local value
  if index.parts then value = string.sub(key, 1, after_parts(key, index.parts) - 2) else value = c[index.place] or nil end
  if value == nil or index.score then return value end
  if index.rank then return value .. '\0' .. hex16(c[index.rank]) .. key end
  return value .. '\0' .. key
end

-- Notes that a row is about to change, with its index entries as they are stored.
local function touch(s, t, key)
  local original = s.original[t]
  if original == nil then original = {}; s.original[t] = original end
  if original[key] ~= nil then return end
  local indexes, entries = TABLES[t].indexes, false
  if s.rows[t][key] then
    entries = {}
    if #indexes > 0 then
      local c = get(s, t, key).c
      for i, index in ipairs(indexes) do entries[i] = index_entry(index, c, key) end
    end
  end
  original[key] = entries
  s.dirty[#s.dirty + 1] = t
  s.dirty[#s.dirty + 1] = key
end

-- Notes the same about a row that is not unpacked, and whose index entries the caller knows; the members of text indexes
-- may lack the key that ends them (`is_keyless`), so that many rows share them.
local function touch_packed(s, t, key, entries)
  local original = s.original[t]
  if original == nil then original = {}; s.original[t] = original end
  if original[key] ~= nil then return end
  original[key] = entries
  s.dirty[#s.dirty + 1] = t
  s.dirty[#s.dirty + 1] = key
end

-- Returns the index entries of a touched row as they are stored; false if it was not there.
local function stored_entries(s, t, key)
  local entries = s.original[t][key]
  if not entries or not entries.is_keyless then return entries end
  local own = {}
  for i, index in ipairs(TABLES[t].indexes) do
    own[i] = entries[i]
    if own[i] ~= nil and not index.score then own[i] = own[i] .. key end
  end
  return own
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
    s.entries[#s.entries + 1] = id
    local ms, seq = string.match(id, '(%d+)-(%d+)')
    ms, seq = tonumber(ms), tonumber(seq)
    if #keys > 0 then
      local old, new, own = redis.call('HMGET', history, unpack(keys)), {}, {}
      for _, renewed in ipairs({ 0, 32768 }) do
        own[renewed] = struct.pack('>I4I2I2', math.floor(ms / 65536), ms % 65536, math.min(seq, 32767) + renewed)
      end
      for i, key in ipairs(keys) do
        if s.histories[key] == nil then s.histories[key] = old[i] end
        new[#new + 1] = key
        new[#new + 1] = shorten((old[i] or '') .. own[ids[key]])
      end
      redis.call('HSET', history, unpack(new))
    end
  end
end

-- Notes the histories of rows that are about to be deleted.
local function remember_histories(s, deleted)
  local keys = {}
  for key in pairs(deleted) do keys[#keys + 1] = key end
  for start = 1, #keys, 1000 do
    local stop = math.min(start + 999, #keys)
    local found = redis.call('HMGET', s.tag .. ':h', unpack(keys, start, stop))
    for i = start, stop do s.histories[keys[i]] = found[i - start + 1] end
  end
end

-- Restores everything as it was before the first write. Each command is tried, whatever became of the others.
local function undo(s, added)
  local hset, hdel, zadd, zrem, history = {}, {}, {}, {}, s.tag .. ':h'
  for name, arguments in pairs(added) do
    for i = 2, #arguments, 2 do collect(zrem, name, arguments[i]) end
  end
  for i = 1, #s.dirty, 2 do
    local t, key = s.dirty[i], s.dirty[i + 1]
    local def, old, name = TABLES[t], stored_entries(s, t, key), key_of(s, TABLES[t].name)
    if old then
      collect(hset, name, key, s.stored[t][key])
      if def.listed then collect(zadd, name .. ':k', 0, key) end
      for j, index in ipairs(def.indexes) do
        local entry = old[j]
        if entry ~= nil then
          local indexed = key_of(s, index.name)
          if index.score then collect(zadd, indexed, score(entry), key) else collect(zadd, indexed, 0, entry) end
        end
      end
    else
      collect(hdel, name, key)
    end
  end
  for key, ids in pairs(s.histories) do
    if ids then collect(hset, history, key, ids) else collect(hdel, history, key) end
  end
  for _, id in ipairs(s.entries) do pcall(redis.call, 'XDEL', s.tag .. ':f', id) end
  pcall(send, 'HDEL', hdel)
  pcall(send, 'ZREM', zrem)
  pcall(send, 'HSET', hset)
  pcall(send, 'ZADD', zadd)
end

local function write(s, hset, hdel, zadd, zrem, deleted)
  if #s.events > 0 then write_events(s, deleted) end
  send('HDEL', hdel)
  send('ZREM', zrem)
  send('HSET', hset)
  send('ZADD', zadd)
end

-- Collects the writes of one row: of its hash, its list of keys and its indexes.
local function collect_row(s, t, key, hset, hdel, zadd, zrem, deleted)
  local def, row = TABLES[t], s.rows[t][key]
  local name = key_of(s, def.name)
  if row and row.moves then
    collect(hset, name, key, row.packed)
    for _, move in ipairs(row.moves) do
      if move.removed then collect(zrem, move.name, move.removed .. key) end
      if move.added then collect(zadd, move.name, move.score, move.added .. key) end
    end
    return
  end
  local old = stored_entries(s, t, key)
  if row then
    local entries = row.entries -- of a row that is still packed
    collect(hset, name, key, row.final or row.packed or pack_row(def, row))
    if def.listed and not old then collect(zadd, key_of(s, def.name .. ':k'), 0, key) end
    for j, index in ipairs(def.indexes) do
      local before, after = old and old[j], nil
      if entries then after = entries[j] else after = index_entry(index, row.c, key) end
      if before == false then before = nil end
      if before ~= after then
        local indexed = key_of(s, index.name)
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
    if def.listed then collect(zrem, key_of(s, def.name .. ':k'), key) end
    for j, index in ipairs(def.indexes) do
      if old[j] ~= nil then collect(zrem, key_of(s, index.name), index.score and key or old[j]) end
    end
    if def.history then
      collect(hdel, key_of(s, 'h'), key)
      deleted[key] = true
    end
  end
end

-- Writes everything that the call has changed. This should not fail, because the server rolls nothing back; if it does
-- nevertheless, what was written is undone before the error is returned.
local function flush(s)
  local hset, hdel, zadd, zrem, deleted = {}, {}, {}, {}, {}
  for i = 1, #s.dirty, 2 do collect_row(s, s.dirty[i], s.dirty[i + 1], hset, hdel, zadd, zrem, deleted) end
  remember_histories(s, deleted)
  local is_written, failure = pcall(write, s, hset, hdel, zadd, zrem, deleted)
  if not is_written then
    undo(s, zadd)
    error(failure)
  end
end
