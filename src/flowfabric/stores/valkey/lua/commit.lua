-- commit: tag, now or '', { changes, forms, shapes }, blobs … -> { now, verdicts }
--
-- 1. Read all rows that the changes name. 2. Judge every change on these rows. 3. Check, for each accepted change in
-- order, that its instants can be stored and its inserts exist neither in the store nor by an earlier change of the
-- call. 4. Apply it in memory. 5. Write. Everything before 5 may fail, because nothing is written yet.
--
-- A change is { not before, not after, revision, guards, writes, events or nil, form }. A verdict is '1' if the change was
-- written, '0' if it was refused and '2' if an instant cannot be stored. Packed rows: `packed.lua`; forms: `templates.lua`
-- and, for many rows at once, `alike.lua`.

local INSERT, UPSERT, PATCH, DELETE, DELETE_PREFIX, PACKED_INSERT, PACKED_UPSERT = 1, 2, 3, 4, 5, 6, 7

local function holds(s, guard)
  local t, key, kind = guard[1], guard[2], guard[3]
  local row, def = get(s, t, key), TABLES[t]
  if kind == ABSENT then return row == nil end
  if row == nil then return false end
  local c = row.c
  if kind == REVISION then return c[def.revision] == guard[4] end
  if kind == LEASE then
    if c[def.revision] ~= guard[4] or c[def.lease_id] ~= guard[6] or c[def.lease_epoch] ~= guard[7] then return false end
    local expires_at = c[def.lease_expires_at]
    return expires_at and less(s.now, expires_at) == (guard[5] == 1)
  end
  local expected = guard[4]
  for i = 2, expected[1] * 2, 2 do
    if (c[expected[i]] or false) ~= (expected[i + 1] or false) then return false end
  end
  return true
end

local function accepts(s, change)
  if change[1] ~= nil and less(s.now, change[1]) then return false end
  if change[2] ~= nil and less(change[2], s.now) then return false end
  local guards, first = change[4], 1
  local group = change[7] and group_of_change(s, change)
  if group then
    if not holds_alike(s, group, guards[1]) then return false end
    first = 2
  end
  for i = first, #guards do
    if not holds(s, guards[i]) then return false end
  end
  return true
end

local function begins_with(text, prefix)
  return string.sub(text, 1, #prefix) == prefix
end

-- Returns the verdict on the writes of an accepted change. What it creates and deletes itself is kept in `exists`.
local function check_writes(s, change)
  local writes = change[5]
  if #writes == 0 then return '1' end
  if #writes == 1 and writes[1][1] == PACKED_INSERT and not s.shapes[writes[1][4]][2] then
    return s.rows[writes[1][2]][writes[1][3]] and '0' or '1' -- such a row was not created by this change before
  end
  local exists, prefixes = {}, {}
  for _, write in ipairs(writes) do
    local kind, t, key = write[1], write[2], write[3]
    local own = exists[t]
    if own == nil then own = {}; exists[t] = own end
    if kind == INSERT or kind == PACKED_INSERT then
      local there = own[key]
      if there == nil then
        there = s.rows[t][key] and true
        for _, prefix in ipairs(prefixes) do
          if prefix[1] == t and begins_with(key, prefix[2]) then there = false end
        end
      end
      if there then return '0' end
    end
    if kind == INSERT or kind == UPSERT or kind == PACKED_INSERT or kind == PACKED_UPSERT then
      own[key] = true
    elseif kind == DELETE then
      own[key] = false
    elseif kind == DELETE_PREFIX then
      for created in pairs(own) do
        if begins_with(created, key) then own[created] = false end
      end
      prefixes[#prefixes + 1] = { t, key }
    end
    local instants = write[6]
    if kind == PACKED_INSERT or kind == PACKED_UPSERT then instants = s.shapes[write[4]][2] end
    if instants then
      for i = 2, #instants, 2 do
        if add(s.now, instants[i]) == nil then return '2' end
      end
    end
  end
  return '1'
end

local function set_row(s, write, revision, arguments)
  local t, key = write[2], write[3]
  local def, old = TABLES[t], get(s, t, key)
  touch(s, t, key)
  local row = { c = write[5], n = write[4] }
  if old and old.n > def.width then
    for place = def.width + 1, old.n do put(row, place, old.c[place]) end
  end
  if write[7] then row.b = arguments[write[7]] end
  s.rows[t][key] = row
  return row
end

local function patch_row(s, write, arguments)
  local t, key = write[2], write[3]
  local row, fields = get(s, t, key), write[5]
  if row == nil or (write[8] and row.c[write[8]]) then return nil end
  touch(s, t, key)
  for i = 1, write[4] * 2, 2 do put(row, fields[i], fields[i + 1]) end
  if write[7] then row.b = arguments[write[7]] end
  return row
end

local function apply_write(s, write, revision, arguments)
  local kind, t, key = write[1], write[2], write[3]
  local row
  if kind == PACKED_INSERT or kind == PACKED_UPSERT then
    set_packed_row(s, t, key, s.shapes[write[4]], arguments)
  elseif kind == PATCH then
    row = patch_row(s, write, arguments)
  elseif kind == DELETE then
    touch(s, t, key)
    s.rows[t][key] = false
  elseif kind == DELETE_PREFIX then
    local keys = keys_with_prefix(s, t, key)
    fetch(s, t, keys)
    for _, found in ipairs(keys) do touch(s, t, found) end
    for found in pairs(s.rows[t]) do
      if begins_with(found, key) then s.rows[t][found] = false end
    end
  else
    row = set_row(s, write, revision, arguments)
  end
  if row == nil then return end
  local def, instants = TABLES[t], write[6]
  if instants then
    for i = 1, #instants, 2 do put(row, instants[i], add(s.now, instants[i + 1])) end
  end
  if def.revision then put(row, def.revision, revision) end
end

local function apply_change(s, change, forms, arguments)
  local form = change[7]
  if form and not change_alike(s, change, forms[form]) then
    local guard = change[4][1]
    apply_template(s, guard[1], guard[2], get(s, guard[1], guard[2]), forms[form], {}, change[3])
  end
  for _, write in ipairs(change[5]) do apply_write(s, write, change[3], arguments) end
  local events = change[6]
  if not events then return end
  for i = 1, #events, 2 do
    s.events[#s.events + 1] = { key = events[i], blob = arguments[events[i + 1]] }
  end
end

local function fetch_named_rows(s, changes)
  local keys = {}
  for _, change in ipairs(changes) do
    for _, guard in ipairs(change[4]) do collect(keys, guard[1], guard[2]) end
    for _, write in ipairs(change[5]) do
      if write[1] ~= DELETE_PREFIX then
        collect(keys, write[2], write[3])
      elseif s.rows[write[2]] == nil then
        s.rows[write[2]] = {}
      end
    end
  end
  for t, named in pairs(keys) do fetch(s, t, named) end
end

local function commit(_, arguments)
  local s, batch = open_state(arguments[1], arguments[2]), cmsgpack.unpack(arguments[3])
  local changes, forms, verdicts = batch[1], batch[2], {}
  s.shapes = batch[3]
  fetch_named_rows(s, changes)
  for i, change in ipairs(changes) do verdicts[i] = accepts(s, change) and '1' or '0' end
  for i, change in ipairs(changes) do
    if verdicts[i] == '1' then verdicts[i] = check_writes(s, change) end
    if verdicts[i] == '1' then apply_change(s, change, forms, arguments) end
  end
  flush(s)
  return { s.now, table.concat(verdicts) }
end
