-- The feed. Every partition has a stream of entries, each with the events of one call. The stream `{ff}:feed` refers to
-- these entries in the order of the feed: the id of a reference is the position of the first event of its entry.

-- number: tag, id of the last numbered entry, { id, number of events } … -> 1 if these are numbered now, else 0
-- Positions follow the server's time, so that they rise even if the newest references are lost in a failover.
local function number(_, arguments)
  local tag, from = arguments[1], arguments[2]
  if (redis.call('HGET', '{ff}:from', tag) or '') ~= from then return 0 end
  local last = redis.call('HGET', '{ff}:from', 'end') or '0-0'
  local ms, seq = string.match(last, '(%d+)-(%d+)')
  ms, seq = tonumber(ms), tonumber(seq)
  local now = server_time()
  if now > ms then ms, seq = now, 0 end
  for i = 3, #arguments, 2 do
    local count = tonumber(arguments[i + 1])
    if seq + 1 + count >= 1048576 then ms, seq = ms + 1, 0 end
    redis.call('XADD', '{ff}:feed', string.format('%.0f-%.0f', ms, seq + 1), 't', tag, 'i', arguments[i], 'n', count)
    seq = seq + count
  end
  redis.call('HSET', '{ff}:from', tag, arguments[#arguments - 1], 'end', string.format('%.0f-%.0f', ms, seq))
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

-- rewind: tag, id -> 1. Makes the ids of a partition go on after those that were numbered, if a failover lost them.
local function rewind(_, arguments)
  local feed = arguments[1] .. ':f'
  if redis.call('EXISTS', feed) == 0 then
    redis.call('XADD', feed, arguments[2], 'a', '0')
    redis.call('XDEL', feed, arguments[2])
  else
    redis.call('XSETID', feed, arguments[2])
  end
  return 1
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
