-- Row templates. A form is { constants, computed fields, event }: constants as { count, place, value, … }, fields as
-- { place, expression } and the event as { count, constants …, { place, expression } … }.
-- An expression is { 0, constant }, { 1, offset from now }, { 2, column }, { 3, parameter }, { 4, left, right } (sum),
-- { 5, column, then, otherwise } (if set) or { 6 } (the key text).

local function evaluate(e, s, c, key, parameters)
  local kind = e[1]
  if kind == 2 then return c[e[2]] end
  if kind == 0 then return e[2] end
  if kind == 1 then return add(s.now, e[2]) end
  if kind == 3 then return parameters[e[2]] end
  if kind == 6 then return key end
  if kind == 5 then
    local chosen = e[4]
    if c[e[2]] then chosen = e[3] end
    return evaluate(chosen, s, c, key, parameters)
  end
  local left = evaluate(e[2], s, c, key, parameters)
  local right = evaluate(e[3], s, c, key, parameters)
  if not left or not right then return nil end
  return add(left, right)
end

-- Applies a template to a row; the values are those of the row before any of them is written.
local function apply_template(s, t, key, row, form, parameters, revision)
  local def, constants, fields, values = TABLES[t], form[1], form[2], {}
  touch(s, t, key)
  for i = 1, #fields do values[i] = evaluate(fields[i][2], s, row.c, key, parameters) end
  for i = 2, constants[1] * 2, 2 do put(row, constants[i], constants[i + 1]) end
  for i = 1, #fields do put(row, fields[i][1], values[i]) end
  if revision then put(row, def.revision, revision) end
  local event, emitted, n = form[3], {}, 0
  for i = 1, #event do
    local place = event[i][1]
    emitted[place] = evaluate(event[i][2], s, row.c, key, parameters)
    if place > n then n = place end
  end
  s.events[#s.events + 1] = { key = key, blob = pack_array(emitted, n), renewed = form[4] }
end

-- True if a row meets the condition of a template: { equal { place, expression } …, future places }.
local function meets(s, row, key, condition, parameters)
  for _, one in ipairs(condition[1]) do
    if (row.c[one[1]] or false) ~= (evaluate(one[2], s, row.c, key, parameters) or false) then return false end
  end
  for _, place in ipairs(condition[2]) do
    local value = row.c[place]
    if not value or not less(s.now, value) then return false end
  end
  return true
end
