"""The dispatcher's writes as Lua scripts: each checks the fencing token and is atomic.

So a request lies in exactly one stream at every instant, whoever dies when.
"""

from __future__ import annotations

import hashlib

import msgspec
from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from shared import control
from shared.lease import FENCE_CHECK


class Script(msgspec.Struct, frozen=True):
    """A script with the digest under which Redis knows it."""

    text: str
    sha: str

    @classmethod
    def of(cls, text: str) -> Script:
        text = FENCE_CHECK + text
        return cls(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


class Call(msgspec.Struct, frozen=True):
    """One run of a script; ``keys`` starts with the fence key, ``args`` with the token."""

    script: Script
    keys: tuple[str, ...]
    args: tuple[str | bytes | int, ...]


# Release a batch. KEYS: fence, requests, batches, replica, decisions.
# ARGV: token, incarnation, strict (1|0), group, decisions kept, batch id, model, keys, released,
#       numbers (JSON), body, entry ids…
# {"ok"} | {"replica", state found}: nothing was done
# | {"missing", id…}: these entries are gone; the others are still there (acknowledged): call
#   again without them and with strict 0.
RELEASE = Script.of("""
local found = redis.call('HMGET', KEYS[4], 'state', 'incarnation')
if (found[1] ~= 'serving' and found[1] ~= 'combined') or found[2] ~= ARGV[2] then
  return {'replica', found[1] or ''}
end
local ids = {}
for i = 12, #ARGV do ids[#ids + 1] = ARGV[i] end
local acked = redis.call('XACK', KEYS[2], ARGV[4], unpack(ids))
if acked ~= #ids and ARGV[3] == '1' then
  local missing = {'missing'}
  for _, id in ipairs(ids) do
    if #redis.call('XRANGE', KEYS[2], id, id) == 0 then missing[#missing + 1] = id end
  end
  if #missing > 1 then return missing end
end
redis.call('XDEL', KEYS[2], unpack(ids))
redis.call('XADD', KEYS[3], '*', 'id', ARGV[6], 'model', ARGV[7], 'n', #ids, 'requests', ARGV[8],
           'released', ARGV[9], 'incarnation', ARGV[2], 'body', ARGV[11])
if ARGV[5] ~= '0' then
  redis.call('XADD', KEYS[5], 'MAXLEN', '~', ARGV[5], '*', 'batch', ARGV[6], 'model', ARGV[7],
             'replica', string.match(KEYS[4], '([^:]*)$'), 'requests', ARGV[8], 'released',
             ARGV[9], 'numbers', ARGV[10])
end
return {'ok'}
""")

# End queued requests without an answer. KEYS: fence, requests, replies, gateway's heartbeat,
# decisions. ARGV: token, group, entry id, body of the reply ('' = say nothing: nobody waits),
# decisions kept, model, key, why it is refused ('': it is not).
# 1, or 0 when the entry was gone.
ANSWER = Script.of("""
redis.call('XACK', KEYS[2], ARGV[2], ARGV[3])
if redis.call('XDEL', KEYS[2], ARGV[3]) == 0 then return 0 end
if ARGV[4] ~= '' and redis.call('EXISTS', KEYS[3], KEYS[4]) > 0 then
  redis.call('XADD', KEYS[3], '*', 'body', ARGV[4])
end
if ARGV[5] ~= '0' and ARGV[8] ~= '' then
  redis.call('XADD', KEYS[5], 'MAXLEN', '~', ARGV[5], '*', 'model', ARGV[6], 'requests', ARGV[7],
             'refused', ARGV[8])
end
return 1
""")

# Queue a copy of a request in flight and have the replica cancel it.
# KEYS: fence, requests, control. ARGV: token, request id, Cancel, field, value, field, value…
TAKE_BACK = Script.of(f"""
redis.call('XADD', KEYS[2], '*', unpack(ARGV, 4))
redis.call('XADD', KEYS[3], 'MAXLEN', '~', {control.MAXLEN}, '*',
           'kind', 'cancel', 'id', ARGV[2], 'body', ARGV[3])
return 1
""")

# Take an unfinished batch from a replica that is gone.
# KEYS: fence, batches, then for each member its replies stream and its gateway's heartbeat.
# ARGV: token, group, entry id, then one Lost a member.
REAP = Script.of("""
redis.call('XACK', KEYS[2], ARGV[2], ARGV[3])
if redis.call('XDEL', KEYS[2], ARGV[3]) == 0 then return 0 end
for i = 4, #ARGV do
  local replies, alive = KEYS[2 * i - 5], KEYS[2 * i - 4]
  if redis.call('EXISTS', replies, alive) > 0 then
    redis.call('XADD', replies, '*', 'body', ARGV[i])
  end
end
return 1
""")

# Delete a consumer that has nothing pending. KEYS: fence, stream. ARGV: token, group, consumer.
FORGET_CONSUMER = Script.of("""
if #redis.call('XPENDING', KEYS[2], ARGV[2], '-', '+', 1, ARGV[3]) > 0 then return 0 end
redis.call('XGROUP', 'DELCONSUMER', KEYS[2], ARGV[2], ARGV[3])
return 1
""")

# Delete what belonged to a gateway that is gone. KEYS: fence, alive, replies, set of gateways.
# ARGV: token, gateway. 0 when it is alive after all.
FORGET_GATEWAY = Script.of("""
if redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
redis.call('DEL', KEYS[3])
redis.call('SREM', KEYS[4], ARGV[2])
return 1
""")


async def run(redis: Redis, calls: list[Call]) -> list[object]:
    """Run scripts in one round trip; each result, or the exception in its place.

    A script that Redis does not know (it was restarted) is loaded and run again.
    """
    results = await _pipeline(redis, calls)
    unknown = [i for i, r in enumerate(results) if isinstance(r, NoScriptError)]
    if unknown:
        for script in {calls[i].script.sha: calls[i].script for i in unknown}.values():
            await redis.script_load(script.text)
        again = await _pipeline(redis, [calls[i] for i in unknown])
        for i, result in zip(unknown, again, strict=True):
            results[i] = result
    return results


async def _pipeline(redis: Redis, calls: list[Call]) -> list[object]:
    async with redis.pipeline(transaction=False) as pipe:
        for call in calls:
            pipe.evalsha(call.script.sha, len(call.keys), *call.keys, *call.args)
        results: list[object] = await pipe.execute(raise_on_error=False)
        return results
