-- Rows that the client has packed, so that they are neither unpacked nor packed here. They stand in the state as
-- { packed, entries }; whoever needs their cells gets them unpacked (`get`).
--
-- A shape is { number of the blob, instants, entries }. Instants are { bytes before it, offset from now, … }: the client
-- does not know the time, so they are inserted here. Entries are what the indexes hold for the row, four values each:
-- index, kind, and value and offset by kind. A shape may serve many rows.

local SCORE, SCORE_FROM_NOW, MEMBER, MEMBER_FROM_NOW = 0, 1, 2, 3

local function packed_instant(s, offset)
  local packed = s.instants[offset]
  if packed == nil then
    packed = cmsgpack.pack(add(s.now, offset))
    s.instants[offset] = packed
  end
  return packed
end

local function packed_blob(s, shape, arguments)
  if shape.blob then return shape.blob end
  local blob, instants = arguments[shape[1]], shape[2]
  if instants then
    local parts, from = {}, 1
    for i = 1, #instants, 2 do
      parts[#parts + 1] = string.sub(blob, from, instants[i])
      parts[#parts + 1] = packed_instant(s, instants[i + 1])
      from = instants[i] + 1
    end
    parts[#parts + 1] = string.sub(blob, from)
    blob = table.concat(parts)
  end
  shape.blob = blob
  return blob
end

-- Returns the same as `index_entry` for every index.
local function packed_entries(s, entries, key)
  local result = {}
  for i = 1, #entries, 4 do
    local index, kind, value = entries[i], entries[i + 1], entries[i + 2]
    if kind == SCORE then
      result[index] = value
    elseif kind == SCORE_FROM_NOW then
      result[index] = add(s.now, value)
    elseif kind == MEMBER then
      result[index] = value .. key
    else
      result[index] = value .. hex16(add(s.now, entries[i + 3])) .. key
    end
  end
  return result
end

-- Inserts or replaces a row. Cells that a later release appended to the old row are carried over.
local function set_packed_row(s, t, key, shape, arguments)
  local def, old = TABLES[t], get(s, t, key)
  touch(s, t, key)
  local row = { packed = packed_blob(s, shape, arguments), entries = packed_entries(s, shape[3], key) }
  if old and old.n > def.width then
    row = unpack_row(def, row.packed)
    for place = def.width + 1, old.n do put(row, place, old.c[place]) end
  end
  s.rows[t][key] = row
end
