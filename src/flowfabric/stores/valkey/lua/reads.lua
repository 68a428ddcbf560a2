-- Functions that only read. Rows are returned as key text (or index member) and blob, in turn.

local function append_rows(result, name, keys, members)
  for start = 1, #keys, 1000 do
    local stop = math.min(start + 999, #keys)
    local blobs = redis.call('HMGET', name, unpack(keys, start, stop))
    for i = start, stop do
      local blob = blobs[i - start + 1]
      if blob then
        result[#result + 1] = members[i]
        result[#result + 1] = blob
      end
    end
  end
end

-- load: tag, now or '', { exact { table, key … } …, prefixes { table, prefix } … }
--     -> { now, { { row or false … } … }, { { rows } … } }
local function load(_, arguments)
  local s, request = open_state(arguments[1], arguments[2]), cmsgpack.unpack(arguments[3])
  local exact, listed = {}, {}
  for i, group in ipairs(request[1]) do
    exact[i] = redis.call('HMGET', s.tag .. ':' .. TABLES[group[1]].name, unpack(group, 2))
  end
  for i, read in ipairs(request[2]) do
    local def, rows = TABLES[read[1]], {}
    if def.listed then
      local keys = keys_with_prefix(s, read[1], read[2])
      append_rows(rows, s.tag .. ':' .. def.name, keys, keys)
    else
      rows = redis.call('HGETALL', s.tag .. ':' .. def.name)
    end
    listed[i] = rows
  end
  return { s.now, exact, listed }
end

-- due: tag, now or '', table, index, offset, limit -> { now, rows, next instant or '' }
local function due(_, arguments)
  local s, t = open_state(arguments[1], arguments[2]), tonumber(arguments[3])
  local def, rows, next_at = TABLES[t], {}, ''
  local index = def.indexes[tonumber(arguments[4])]
  local name, now = s.tag .. ':' .. index.name, string.format('%.0f', s.now)
  local limit = tonumber(arguments[6])
  if limit > 0 then
    local keys = redis.call('ZRANGEBYSCORE', name, '-inf', now, 'LIMIT', arguments[5], limit)
    append_rows(rows, s.tag .. ':' .. def.name, keys, keys)
  end
  local later = redis.call('ZRANGEBYSCORE', name, '(' .. now, '+inf', 'LIMIT', 0, 1)
  if #later > 0 then
    fetch(s, t, later)
    local row = get(s, t, later[1])
    if row then next_at = hex16(row.c[index.place]) end
  end
  return { s.now, rows, next_at }
end

-- Returns the key text that ends a member of a text index.
local function member_key(index, member)
  local start = after_parts(member, index.parts or 1)
  if index.rank then start = start + 16 end
  return string.sub(member, start)
end

-- range: tag, table, index (0: by key), first, last, offset, limit, '1' to read backwards
--     -> { number of members, members and rows }
-- The bounds are those of ZRANGEBYLEX, or scores; only an index of scores is read backwards.
local function range(_, arguments)
  local tag, def, number = arguments[1], TABLES[tonumber(arguments[2])], tonumber(arguments[3])
  local name, index, members = tag .. ':' .. def.name .. ':k', nil, nil
  if number > 0 then
    index = def.indexes[number]
    name = tag .. ':' .. index.name
  end
  local command, first, last = 'ZRANGEBYLEX', arguments[4], arguments[5]
  if index and index.score then command = 'ZRANGEBYSCORE' end
  if arguments[8] == '1' then command, first, last = 'ZREVRANGEBYSCORE', last, first end
  members = redis.call(command, name, first, last, 'LIMIT', arguments[6], arguments[7])
  local keys = members
  if index and not index.score then
    keys = {}
    for i, member in ipairs(members) do keys[i] = member_key(index, member) end
  end
  local rows = {}
  append_rows(rows, tag .. ':' .. def.name, keys, members)
  return { #members, rows }
end

-- kinds: tag, key text … -> the kinds of executions, false for one without a payload
local function kinds(_, arguments)
  local tag, t, keys, found = arguments[1], TABLES[PAYLOADS], {}, {}
  for i = 2, #arguments do keys[i - 1] = arguments[i] end
  for i, blob in ipairs(redis.call('HMGET', tag .. ':payload', unpack(keys))) do
    found[i] = blob and unpack_row(t, blob).c[t.execution_kind]
  end
  return found
end

-- values: tag, table, index, first, last, limit -> the distinct values of a text index
local function values(_, arguments)
  local tag, def = arguments[1], TABLES[tonumber(arguments[2])]
  local name, found = tag .. ':' .. def.indexes[tonumber(arguments[3])].name, {}
  local first, last, limit = arguments[4], arguments[5], tonumber(arguments[6])
  while #found < limit do
    local members = redis.call('ZRANGEBYLEX', name, first, last, 'LIMIT', 0, 1)
    if #members == 0 then break end
    local value = string.sub(members[1], 1, string.find(members[1], '\0', 1, true) - 1)
    found[#found + 1] = value
    first = '[' .. value .. '\1'
  end
  return found
end

-- heads: tag, depth, queues … -> { number of rows, { position and key text … } } over all queues
local function queue_heads(_, arguments)
  local line, total, found = arguments[1] .. ':exec_core:line', 0, {}
  for i = 3, #arguments do
    local queue = arguments[i]
    local first, last = '[' .. queue .. '\0', '(' .. queue .. '\1'
    local members = redis.call('ZRANGEBYLEX', line, first, last, 'LIMIT', 0, arguments[2])
    if #members > 0 then
      total = total + redis.call('ZLEXCOUNT', line, first, last)
      for _, member in ipairs(members) do found[#found + 1] = string.sub(member, #queue + 2) end
    end
  end
  return { total, found }
end

-- count: tag, table, index, first, last, offset, limit, source, group places { … }
--     -> { number of members, { packed values, count … } }
-- Counts the members of an index by columns of their executions. The source says where a row names its execution: 0 is
-- its key text, a positive number the place of a column, a negative one the part of its key.
local function execution_key(tag, def, source, key, blob)
  local id = key
  if source > 0 then
    id = unpack_row(def, blob).c[source]
  elseif source < 0 then
    local part = 0
    for text in string.gmatch(key .. '\0', '(.-)%z') do
      part = part - 1
      if part == source then id = text end
    end
  end
  if string.sub(id, 1, #tag + 1) == tag .. ':' then return '{' .. string.sub(id, #tag + 2) end
  return id
end

local function count(_, arguments)
  local tag, def = arguments[1], TABLES[tonumber(arguments[2])]
  local index, source = def.indexes[tonumber(arguments[3])], tonumber(arguments[8])
  local places, counts, order = cmsgpack.unpack(arguments[9]), {}, {}
  local command = index.score and 'ZRANGEBYSCORE' or 'ZRANGEBYLEX'
  local members =
    redis.call(command, tag .. ':' .. index.name, arguments[4], arguments[5], 'LIMIT', arguments[6], arguments[7])
  local keys = {}
  for i, member in ipairs(members) do keys[i] = index.score and member or member_key(index, member) end
  if #keys > 0 then
    local blobs = redis.call('HMGET', tag .. ':' .. def.name, unpack(keys))
    if TABLES[EXECUTIONS] ~= def then
      local ids = {}
      for i, key in ipairs(keys) do
        if blobs[i] then ids[#ids + 1] = execution_key(tag, def, source, key, blobs[i]) end
      end
      blobs = #ids > 0 and redis.call('HMGET', tag .. ':exec_core', unpack(ids)) or {}
    end
    for i = 1, #blobs do
      if blobs[i] then
        local c, group = unpack_row(TABLES[EXECUTIONS], blobs[i]).c, {}
        for j, place in ipairs(places) do group[j] = c[place] end
        group = pack_array(group, #places)
        if counts[group] == nil then order[#order + 1] = group end
        counts[group] = (counts[group] or 0) + 1
      end
    end
  end
  local result = {}
  for _, group in ipairs(order) do
    result[#result + 1] = group
    result[#result + 1] = counts[group]
  end
  return { #members, result }
end
