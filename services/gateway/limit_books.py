"""A tenant's books in Redis, as scripts: levels of requests and tokens, and what runs now.

KEYS of both: ``names.tenant_levels``, ``names.tenant_running``. Both keys expire.
"""

STALE_SECONDS = 5  # without a report a process's running requests no longer count

# A level refills evenly, `limit` a minute; a missing one is full. KEYS: levels, running.
_BOOKS = """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
local function level(name, limit)
  local saved = redis.call('HMGET', KEYS[1], name, name .. '_at')
  if limit == 0 or not saved[1] then return limit end
  local since = math.max(0, now - tonumber(saved[2]))
  return math.min(limit, tonumber(saved[1]) + since * limit / 60)
end
local function put(name, value)
  redis.call('HSET', KEYS[1], name, string.format('%.6f', value),
             name .. '_at', string.format('%.6f', now))
  redis.call('EXPIRE', KEYS[1], 61)
end
local function report(process, running)
  if running > 0 then
    redis.call('HSET', KEYS[2], process, running .. ' ' .. time[1])
    redis.call('EXPIRE', KEYS[2], 60)
  else
    redis.call('HDEL', KEYS[2], process)
  end
end
"""
# ARGV: process, limits of requests, tokens, concurrency (0: none), the request's tokens, seconds
# until a report is stale. Returns what is used up ('': let in), the levels, seconds to wait.
ADMIT = (
    _BOOKS
    + """
local wanted, most = {requests = 1, tokens = tonumber(ARGV[5])}, tonumber(ARGV[4])
local limit = {requests = tonumber(ARGV[2]), tokens = tonumber(ARGV[3])}
local have = {requests = level('requests', limit.requests), tokens = level('tokens', limit.tokens)}
local function answer(what, wait)
  return {what, string.format('%.6f', have.requests), string.format('%.6f', have.tokens),
          string.format('%.6f', wait)}
end
local mine = 0
if most > 0 then
  local others, flat = 0, redis.call('HGETALL', KEYS[2])
  for i = 1, #flat, 2 do
    local count, at = string.match(flat[i + 1], '^(%d+) (%d+)$')
    if flat[i] == ARGV[1] then
      mine = tonumber(count)
    elseif time[1] - at > tonumber(ARGV[6]) then
      redis.call('HDEL', KEYS[2], flat[i])
    else
      others = others + count
    end
  end
  if mine + others >= most then return answer('concurrency', 1) end
end
for _, name in ipairs({'requests', 'tokens'}) do
  if limit[name] > 0 and have[name] < wanted[name] then
    return answer(name, (wanted[name] - have[name]) * 60 / limit[name])
  end
end
for _, name in ipairs({'requests', 'tokens'}) do
  if limit[name] > 0 then
    have[name] = have[name] - wanted[name]
    put(name, have[name])
  end
end
if most > 0 then report(ARGV[1], mine + 1) end
return answer('', 0)
"""
)
# ARGV: process, running requests or -1 (no limit), limit of tokens, tokens given back.
REPORT = (
    _BOOKS
    + """
if tonumber(ARGV[2]) >= 0 then report(ARGV[1], tonumber(ARGV[2])) end
local limit, back = tonumber(ARGV[3]), tonumber(ARGV[4])
if limit > 0 and back > 0 and redis.call('HEXISTS', KEYS[1], 'tokens') == 1 then
  put('tokens', math.min(limit, level('tokens', limit) + back))
end
return 1
"""
)
