"""The Lua scripts by which the adapter registry changes: each one step, told in ``events``.

KEYS: adapter hash, versions hash, events, set of adapters. ARGV[1] events length, [2] name; what
follows stands above each script.
"""

from __future__ import annotations

_EVENT = """
local function tell(kind, name, version, why)
  local now = redis.call('TIME')
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[1], '*', 'kind', kind, 'adapter', name,
             'version', version, 'why', why, 'time',
             now[1] .. '.' .. string.format('%06d', now[2]))
end
"""
# [3], [4] and so on: fields and values, base and tenant among them. Answers {made, base, tenant}
REGISTER = (
    _EVENT
    + """
local base = redis.call('HGET', KEYS[1], 'base')
if base then return {0, base, redis.call('HGET', KEYS[1], 'tenant') or ''} end
local now = redis.call('TIME')
redis.call('HSET', KEYS[1], 'created', now[1] .. '.' .. string.format('%06d', now[2]),
           unpack(ARGV, 3))
redis.call('SADD', KEYS[4], ARGV[2])
tell('adapter_registered', ARGV[2], '', '')
return {1, '', ''}
"""
)
# [3] version, [4] entry, [5] promote, [6] expected current or '*', [7] quality, [8] why
PUBLISH = (
    _EVENT
    + """
if redis.call('EXISTS', KEYS[1]) == 0 then return {-2, ''} end
local current = redis.call('HGET', KEYS[1], 'current') or ''
if redis.call('HEXISTS', KEYS[2], ARGV[3]) == 1 then return {0, current} end
if ARGV[6] ~= '*' and current ~= ARGV[6] then return {-1, current} end
redis.call('HSET', KEYS[2], ARGV[3], ARGV[4])
if ARGV[5] == '1' then
  redis.call('HSET', KEYS[1], 'current', ARGV[3], 'quality', ARGV[7])
  tell('adapter_published', ARGV[2], ARGV[3], ARGV[8])
else
  tell('adapter_kept', ARGV[2], ARGV[3], ARGV[8])
end
return {1, current}
"""
)
# [3] version, [4] quality, [5] why
MAKE_CURRENT = (
    _EVENT
    + """
if redis.call('HEXISTS', KEYS[2], ARGV[3]) == 0 then return 0 end
redis.call('HSET', KEYS[1], 'current', ARGV[3], 'quality', ARGV[4])
tell('adapter_rollback', ARGV[2], ARGV[3], ARGV[5])
return 1
"""
)
# [3] '' for the whole adapter or a version, [4] why
FORGET = (
    _EVENT
    + """
if ARGV[3] == '' then
  local found = redis.call('DEL', KEYS[1], KEYS[2])
  redis.call('SREM', KEYS[4], ARGV[2])
  if found > 0 then tell('adapter_forgotten', ARGV[2], '', ARGV[4]) end
  return found
end
if redis.call('HGET', KEYS[1], 'current') == ARGV[3] then return -1 end
local found = redis.call('HDEL', KEYS[2], ARGV[3])
if found > 0 then tell('adapter_version_forgotten', ARGV[2], ARGV[3], ARGV[4]) end
return found
"""
)
# KEYS: adapter hash alone. ARGV: field, value. Settings are no event.
SET_FIELD = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
"""
