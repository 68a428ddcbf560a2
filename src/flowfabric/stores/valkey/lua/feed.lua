-- The feed. Every partition has a stream of entries, each with the events of one call. The stream `{ff}:feed` refers to
-- these entries in the order of the feed: the id of a reference is the position of the first event of its entry.

-- Positions never go back: if this server began another lineage, it may have lost the newest references, and its clock
-- may be behind. It then goes on this many milliseconds after all that it knows.
local LEAP_MS = 60000

-- Returns an id that a server changes whenever it may have lost writes: at a failover and at a restart.
local function lineage_of_server()
  return string.sub(string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)') or '', 1, 16)
end

-- number: tag, value of the tag, new value, { id, number of events, checksum } … -> 1 if these are numbered now, else 0
-- The value of a tag is the id of its last numbered entry, the lineage of the server that had it, and its checksum.
local function number(_, arguments)
  local tag = arguments[1]
  if (redis.call('HGET', '{ff}:from', tag) or '') ~= arguments[2] then return 0 end
  local known = redis.call('HMGET', '{ff}:from', 'end', 'lineage')
  local ms, seq = string.match(known[1] or '0-0', '(%d+)-(%d+)')
  ms, seq = tonumber(ms), tonumber(seq)
  local now, lineage = server_time(), lineage_of_server()
  if now > ms then ms, seq = now, 0 end
  if known[2] and known[2] ~= lineage then ms, seq = ms + LEAP_MS, 0 end
  for i = 4, #arguments, 3 do
    local count = tonumber(arguments[i + 1])
    if seq + 1 + count >= 1048576 then ms, seq = ms + 1, 0 end
    local id = string.format('%.0f-%.0f', ms, seq + 1)
    redis.call('XADD', '{ff}:feed', id, 't', tag, 'i', arguments[i], 'n', count, 'c', arguments[i + 2])
    seq = seq + count
  end
  local reached = string.format('%.0f-%.0f', ms, seq)
  redis.call('HSET', '{ff}:from', tag, arguments[3], 'end', reached, 'lineage', lineage)
  return 1
end

-- history: tag, key text -> { id, instant, event … }, newest first
local function history(_, arguments)
  local tag, key, result = arguments[1], arguments[2], {}
  local ids = redis.call('HGET', tag .. ':h', key) or ''
  for at = #ids - 7, 1, -8 do
    local high, low, seq = struct.unpack('>I4I2I2', ids, at)
    local id = string.format('%.0f-%.0f', high * 65536 + low, seq % 32768)
    local found = redis.call('XRANGE', tag .. ':f', id, id)
    if #found > 0 then
      local fields = found[1][2]
      for i = #fields - 1, 3, -2 do
        local event = cmsgpack.unpack(fields[i + 1])
        if event[1] == key then
          result[#result + 1] = fields[2]
          result[#result + 1] = fields[i + 1]
        end
      end
    end
  end
  return result
end

-- tail: tag -> the last id that the stream of a partition gave, also to entries that are gone
local function tail(_, arguments)
  local feed = arguments[1] .. ':f'
  if redis.call('EXISTS', feed) == 0 then return '0-0' end
  local info = redis.call('XINFO', 'STREAM', feed)
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then return info[i + 1] end
  end
  return '0-0'
end

-- rewind: tag, id -> 1. Makes the ids of a partition go on after those that were numbered, if a failover lost them.
local function rewind(keys, arguments)
  local feed = arguments[1] .. ':f'
  local ms, seq = string.match(arguments[2], '(%d+)-(%d+)')
  local last_ms, last_seq = string.match(tail(keys, arguments), '(%d+)-(%d+)')
  ms, seq, last_ms, last_seq = tonumber(ms), tonumber(seq), tonumber(last_ms), tonumber(last_seq)
  if last_ms > ms or (last_ms == ms and last_seq >= seq) then return 1 end
  if redis.call('EXISTS', feed) == 0 then
    redis.call('XADD', feed, arguments[2], 'a', '0')
    redis.call('XDEL', feed, arguments[2])
  else
    redis.call('XSETID', feed, arguments[2])
  end
  return 1
end
