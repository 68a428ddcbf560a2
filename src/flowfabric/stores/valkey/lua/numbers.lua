-- Integers of 64 bits. A cell holds a number below 2^53, else the 16 hexadecimal digits of the value plus 2^63.

-- Returns both halves of the value plus 2^63.
local function halves(v)
  if type(v) == 'string' then
    return tonumber(string.sub(v, 1, 8), 16), tonumber(string.sub(v, 9, 16), 16)
  end
  local high = math.floor(v / 4294967296)
  return high + 2147483648, v - high * 4294967296
end

local function hex16(v)
  if type(v) == 'string' then return v end
  local high, low = halves(v)
  return string.format('%08x%08x', high, low)
end

local function less(a, b)
  if type(a) == 'number' and type(b) == 'number' then return a < b end
  local ah, al = halves(a)
  local bh, bl = halves(b)
  return ah < bh or (ah == bh and al < bl)
end

-- Returns the sum, or nil if it needs more than 64 bits.
local function add(a, b)
  if type(a) == 'number' and type(b) == 'number' then
    local sum = a + b
    if sum < 9007199254740992 and sum > -9007199254740992 then return sum end
  end
  local ah, al = halves(a)
  local bh, bl = halves(b)
  local low, high = al + bl, ah + bh - 2147483648
  if low >= 4294967296 then low, high = low - 4294967296, high + 1 end
  if high < 0 or high >= 4294967296 then return nil end
  local sum = (high - 2147483648) * 4294967296 + low
  if sum < 9007199254740992 and sum > -9007199254740992 then return sum end
  return string.format('%08x%08x', high, low)
end

-- Returns the score of an instant; beyond 2^53 it is rounded, which keeps the order to all instants that matter.
local function score(v)
  if type(v) == 'number' then return string.format('%.0f', v) end
  local high, low = halves(v)
  return string.format('%.17g', (high - 2147483648) * 4294967296 + low)
end
