-- Rows that are alike: those of one millisecond or of one bulk insert often differ only in key and revision, and those of
-- one claim also in lease id and attempt id. A template is then interpreted once for such a group, with marks instead of
-- the values that differ, and the packed row and event are cut at the marks. Every row of the group is these parts with
-- its own values between them.
--
-- A mark is a run of bytes 193, which neither UTF-8 nor a type of msgpack contains, and which an integer has at most 8
-- of. It is as long as the value that it stands for, because the length of a text is packed before it.

local ALIKE = 3 -- rows from which a group costs less than its rows
local SHORTEST = 16 -- length of a mark
local LEASE_ID, ATTEMPT_ID, REVISION_ID, KEY, OLD_REVISION = 1, 2, 3, 4, 5
local ABSENT, REVISION, LEASE = 0, 1, 2 -- kinds of guards

local function mark(number, length)
  if length == 0 then return false end
  return string.rep('\193', length - 1) .. string.char(244 + number)
end

local function split(packed, marks)
  local parts, from = {}, 1
  while true do
    local first, last, number
    for i = 1, #marks do
      local a, b
      if marks[i] then a, b = string.find(packed, marks[i], from, true) end
      if a and (first == nil or a < first) then first, last, number = a, b, i end
    end
    if first == nil then break end
    if number == OLD_REVISION then return nil end -- the template copies the revision
    parts[#parts + 1] = string.sub(packed, from, first - 1)
    parts[#parts + 1] = number
    from = last + 1
  end
  parts[#parts + 1] = string.sub(packed, from)
  return parts
end

-- Most have two to four values; these need no table.
local function join(parts, values)
  local n = #parts
  if n == 5 then return parts[1] .. values[parts[2]] .. parts[3] .. values[parts[4]] .. parts[5] end
  if n == 7 then
    return parts[1] .. values[parts[2]] .. parts[3] .. values[parts[4]] .. parts[5] .. values[parts[6]] .. parts[7]
  end
  if n == 9 then
    return parts[1] .. values[parts[2]] .. parts[3] .. values[parts[4]] .. parts[5] .. values[parts[6]] .. parts[7]
      .. values[parts[8]] .. parts[9]
  end
  local joined = {}
  for i = 1, n - 1, 2 do
    joined[i], joined[i + 1] = parts[i], values[parts[i + 1]]
  end
  joined[n] = parts[n]
  return table.concat(joined)
end

-- Returns the index entries of a row; those of text indexes without the key that ends them. Nil if one has a mark.
local function entries_without_key(c)
  local entries = { is_keyless = true }
  for i, index in ipairs(TABLES[EXECUTIONS].indexes) do
    local entry = index_entry(index, c, '')
    if type(entry) == 'string' and string.find(entry, '\193\193', 1, true) then return nil end
    entries[i] = entry
  end
  return entries
end

-- Returns what changes in the indexes, for `flush`: before and after the key of each row stands a part of a member.
local function moves_between(s, before, after)
  local moves = {}
  for i, index in ipairs(TABLES[EXECUTIONS].indexes) do
    local old, new = before[i], after[i]
    if old ~= new then
      local move = { name = key_of(s, index.name), score = 0 }
      if index.score then
        if new == nil then move.removed = '' else move.added, move.score = '', score(new) end
      else
        move.removed, move.added = old, new
      end
      moves[#moves + 1] = move
    end
  end
  return moves
end

-- Interprets a template once for all rows like this one. `lengths` are those of lease id, attempt id and revision; a row
-- that is claimed gets these ids as parameters, and a claimed one has them already.
local function make_shape(s, blob, key_length, lengths, form, parameters)
  local marks = { mark(LEASE_ID, lengths[1]), mark(ATTEMPT_ID, lengths[2]), mark(REVISION_ID, lengths[3]) }
  marks[KEY], marks[OLD_REVISION] = mark(KEY, key_length), mark(OLD_REVISION, 16)
  local def, key = TABLES[EXECUTIONS], marks[KEY]
  local row, marked = unpack_row(def, blob), {}
  row.c[def.revision] = marks[OLD_REVISION]
  if parameters then
    marked = { marks[1], marks[2], marks[3], parameters[4], parameters[5], parameters[6] }
  else
    row.c[def.lease_id], row.c[def.attempt_id] = marks[LEASE_ID], marks[ATTEMPT_ID]
  end
  local before = entries_without_key(row.c)
  local one = { tag = s.tag, now = s.now, rows = {}, original = {}, dirty = {}, events = {} }
  one.rows[EXECUTIONS] = { [key] = row }
  apply_template(one, EXECUTIONS, key, row, form, marked, marks[REVISION_ID])
  local after = entries_without_key(row.c)
  local packed, event = split(pack_row(def, row), marks), split(one.events[1].blob, marks)
  if not (before and after and packed and event) then return false end
  local moves = moves_between(s, before, after)
  return { lengths = lengths, before = before, moves = moves, packed = packed, event = event }
end

-- Writes a row of a group, with its event; returns it packed.
local function write_alike(s, shape, key, values, is_renewal)
  local packed = join(shape.packed, values)
  touch_packed(s, EXECUTIONS, key, shape.before)
  s.rows[EXECUTIONS][key] = { packed = packed, moves = shape.moves }
  s.events[#s.events + 1] = { key = key, blob = join(shape.event, values), renewed = is_renewal }
  return packed
end

-- True if a row is packed as usual: an array of 16 cells or more that begins with a revision (3 bytes, 1 byte, 16 bytes).
local function is_usual(blob, key)
  return #key >= SHORTEST and string.byte(blob, 1) == 0xdc and string.byte(blob, 4) == 0xb0
end

-- Claims

-- Returns the group of a ready row that was fetched.
local function group_of(s, groups, key)
  local blob = s.rows[EXECUTIONS][key].packed
  local granted_until = TABLES[EXECUTIONS].granted_until
  local same_length = groups[#key]
  if same_length == nil then same_length = {}; groups[#key] = same_length end
  local rest = blob and is_usual(blob, key) and string.sub(blob, 21)
  local group = rest and same_length[rest]
  if not group then
    local granted = get(s, EXECUTIONS, key).c[granted_until]
    group = { blob = blob, count = 0, is_usual = rest and true, granted = granted }
    if rest then same_length[rest] = group end
  end
  return group
end

-- Claims a row of a group, and returns it packed; nil if it must be interpreted.
local function claim_alike(s, group, key, form, parameters)
  if not group.is_usual or group.count < ALIKE or not form[5] then return nil end
  if group.shape == nil then
    local lengths = { #parameters[1], #parameters[2], #parameters[3] }
    local is_long = lengths[1] >= SHORTEST and lengths[2] >= SHORTEST and lengths[3] == 16
    group.shape = is_long and make_shape(s, group.blob, #key, lengths, form, parameters)
  end
  local shape = group.shape
  if not shape then return nil end
  for i = 1, 3 do
    if #parameters[i] ~= shape.lengths[i] then return nil end
  end
  return write_alike(s, shape, key, { parameters[1], parameters[2], parameters[3], key }, form[4])
end

-- Changes with a template, which end most claimed rows

-- Returns where an id stands in a packed row, first and last byte; nil unless it is there once. An unset id has no bytes,
-- at `unset`.
local function place_of(blob, id, unset)
  if not id then return unset, unset - 1 end
  local first, last = string.find(blob, id, 21, true)
  if #id < SHORTEST or first == nil or string.find(blob, id, first + 1, true) then return nil end
  return first, last
end

-- Returns where the ids stand in the rows of one length: { attempt id from, to, lease id from, to, groups = {} }.
local function layout_of(blob, c)
  local def = TABLES[EXECUTIONS]
  local a, b = place_of(blob, c[def.attempt_id], 21)
  local d, e = place_of(blob, c[def.lease_id], #blob + 1)
  if a == nil or d == nil or b >= d then return false end
  return { a, b, d, e, groups = {} }
end

-- Returns the group of rows with the same bytes, except for the ids; false if this row has its ids elsewhere.
local function new_group(blob, layout, c)
  local def = TABLES[EXECUTIONS]
  local attempt_id, lease_id = string.sub(blob, layout[1], layout[2]), string.sub(blob, layout[3], layout[4])
  if attempt_id ~= (c[def.attempt_id] or '') or lease_id ~= (c[def.lease_id] or '') then return false end
  local lengths = { #lease_id, #attempt_id, 16 }
  local epoch, expires_at = c[def.lease_epoch], c[def.lease_expires_at]
  return { blob = blob, layout = layout, lengths = lengths, count = 0, epoch = epoch, expires_at = expires_at }
end

-- Returns the group of the row that a change with a template is about, and notes it in the change.
local function group_of_change(s, change)
  local guard, form = change[4][1], change[7]
  local key, row = guard[2], s.rows[guard[1]][guard[2]]
  local blob = row and row.packed
  if guard[1] ~= EXECUTIONS or (guard[3] ~= REVISION and guard[3] ~= LEASE) or not blob then return nil end
  if not is_usual(blob, key) then return nil end
  local layouts, sizes, c = s.layouts[form], #blob * 1024 + #key, nil
  if layouts == nil then layouts = {}; s.layouts[form] = layouts end
  local layout = layouts[sizes]
  if layout == nil then
    c = unpack_row(TABLES[EXECUTIONS], blob).c
    layout = layout_of(blob, c)
    layouts[sizes] = layout
  end
  if not layout then return nil end
  local before, between = string.sub(blob, 21, layout[1] - 1), string.sub(blob, layout[2] + 1, layout[3] - 1)
  local rest = before .. between .. string.sub(blob, layout[4] + 1)
  local group = layout.groups[rest]
  if group == nil then
    group = new_group(blob, layout, c or unpack_row(TABLES[EXECUTIONS], blob).c)
    layout.groups[rest] = group
  end
  if not group then return nil end
  group.count = group.count + 1
  change.group = group
  return group
end

-- True if the guard on revision and lease holds for a row of a group, whose cells are not unpacked.
local function holds_alike(s, group, guard)
  local blob = s.rows[EXECUTIONS][guard[2]].packed
  if string.sub(blob, 5, 20) ~= guard[4] then return false end
  if guard[3] == REVISION then return true end
  local lease_id = string.sub(blob, group.layout[3], group.layout[4])
  if lease_id ~= guard[6] or group.epoch ~= guard[7] or not group.expires_at then return false end
  return less(s.now, group.expires_at) == (guard[5] == 1)
end

-- Applies the template of a change to a row of a group; false if it must be interpreted.
local function change_alike(s, change, form)
  local group, key = change.group, change[4][1][2]
  if not group or group.count < ALIKE then return false end
  local written = s.original[EXECUTIONS]
  if written and written[key] ~= nil then return false end -- by an earlier change of this call
  if group.shape == nil then group.shape = make_shape(s, group.blob, #key, group.lengths, form, nil) end
  if not group.shape then return false end
  local layout, blob = group.layout, s.stored[EXECUTIONS][key]
  local attempt_id, lease_id = string.sub(blob, layout[1], layout[2]), string.sub(blob, layout[3], layout[4])
  write_alike(s, group.shape, key, { lease_id, attempt_id, change[3], key }, form[4])
  return true
end
