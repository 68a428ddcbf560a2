-- claim: tag, now or '', form, { queues, shared parameters }, { lease id, attempt id, revision } …
--     -> { now, { key text, row, payload … } }
-- Claims the first rows of some queues, at most one for each lease. Rows with an unexpired grant are passed over.

local CANDIDATES = 512 -- looked at beyond those that are wanted, so that a call is short

local function before(a, b)
  if a.high ~= b.high then return a.high < b.high end
  if a.low ~= b.low then return a.low < b.low end
  local x, y = a.key, b.key -- not `<`, which compares by the server's locale
  for i = 1, math.min(#x, #y) do
    local p, q = string.byte(x, i), string.byte(y, i)
    if p ~= q then return p < q end
  end
  return #x < #y
end

-- Returns the keys of the first rows of the queues, in order.
local function heads(s, queues, limit)
  local line, found = key_of(s, 'exec_core:line'), {}
  for _, queue in ipairs(queues) do
    local members = redis.call('ZRANGEBYLEX', line, '[' .. queue .. '\0', '(' .. queue .. '\1', 'LIMIT', 0, limit)
    local start = #queue + 2
    if #queues == 1 then -- they are in order
      for i, member in ipairs(members) do members[i] = string.sub(member, start + 16) end
      return members
    end
    for _, member in ipairs(members) do
      found[#found + 1] = {
        high = tonumber(string.sub(member, start, start + 7), 16),
        low = tonumber(string.sub(member, start + 8, start + 15), 16),
        key = string.sub(member, start + 16),
      }
    end
  end
  table.sort(found, before)
  local keys = {}
  for i = 1, math.min(limit, #found) do keys[i] = found[i].key end
  return keys
end

-- Returns the keys of the rows to claim, and the group of each (`alike.lua`).
local function claimable(s, queues, wanted)
  local limit, seen, chosen, chosen_groups, groups = wanted, 0, {}, {}, {}
  while true do
    local keys = heads(s, queues, limit)
    fetch(s, EXECUTIONS, keys)
    for i = seen + 1, #keys do
      local group = s.rows[EXECUTIONS][keys[i]] and group_of(s, groups, keys[i])
      if group and (not group.granted or not less(s.now, group.granted)) then
        group.count = group.count + 1
        chosen[#chosen + 1] = keys[i]
        chosen_groups[#chosen] = group
        if #chosen == wanted then return chosen, chosen_groups end
      end
    end
    if #keys < limit or limit >= wanted + CANDIDATES then return chosen, chosen_groups end
    seen, limit = #keys, limit * 2 + 8
  end
end

local function claim_interpreted(s, key, form, parameters)
  local row = get(s, EXECUTIONS, key)
  apply_template(s, EXECUTIONS, key, row, form, parameters, parameters[3])
  row.final = pack_row(TABLES[EXECUTIONS], row)
  return row.final
end

local function claim(_, arguments)
  local s, form = open_state(arguments[1], arguments[2]), cmsgpack.unpack(arguments[3])
  local request = cmsgpack.unpack(arguments[4])
  local queues, shared, leases = request[1], request[2], request[3]
  local result = {}
  if #leases > 0 and #queues > 0 then
    local keys, groups = claimable(s, queues, #leases)
    if #keys > 0 then
      local payloads = redis.call('HMGET', s.tag .. ':payload', unpack(keys))
      for i, key in ipairs(keys) do
        local lease = leases[i]
        local parameters = { lease[1], lease[2], lease[3], shared[1], shared[2], shared[3] }
        result[#result + 1] = key
        result[#result + 1] = claim_alike(s, groups[i], key, form, parameters)
          or claim_interpreted(s, key, form, parameters)
        result[#result + 1] = payloads[i]
      end
      flush(s)
    end
  end
  return { s.now, result }
end

-- renew: tag, now or '', { form, condition, { key text, parameters } … } -> { now, { expiry or false … } }
local function renew(_, arguments)
  local s, request = open_state(arguments[1], arguments[2]), cmsgpack.unpack(arguments[3])
  local form, condition, leases, keys, result = request[1], request[2], request[3], {}, {}
  for i, lease in ipairs(leases) do keys[i] = lease[1] end
  fetch(s, EXECUTIONS, keys)
  for i, lease in ipairs(leases) do
    local row = get(s, EXECUTIONS, lease[1])
    result[i] = false
    if row and (not condition or meets(s, row, lease[1], condition, lease[2])) then
      apply_template(s, EXECUTIONS, lease[1], row, form, lease[2], nil)
      local expires_at = row.c[TABLES[EXECUTIONS].lease_expires_at]
      result[i] = expires_at and hex16(expires_at) or false
    end
  end
  flush(s)
  return { s.now, result }
end
