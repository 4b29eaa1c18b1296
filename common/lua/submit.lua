-- Turn a pushed entry into an active job, unless its id is taken.
-- KEYS  1 leader string   2 jobs stream   3 job hash   4 trajectory hash   5 events stream
--       6 active set      7 canceled string   8 result string
-- ARGV  1 nonce   2 entry id ("" if none)   3 id   4 content hash   5 at (ms)
--       6 number of public fields (pairs)   7.. public field, value …   then trajectory field, value …
-- Reply {"created"|"created_canceled"|"same"|"conflict"|"fenced"}
-- The first write is an HSET, so that a Redis at maxmemory refuses new jobs here.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {'fenced'} end
local function type_of(key) return redis.call('TYPE', key).ok end
local record = type_of(KEYS[3])
if record ~= 'none' then
  if record == 'hash' and redis.call('HGET', KEYS[3], 'content') == ARGV[4] then
    if ARGV[2] ~= '' then redis.call('XDEL', KEYS[2], ARGV[2]) end
    return {'same'}
  end
  return {'conflict'}
end
for _, k in ipairs({4, 5, 8}) do
  if type_of(KEYS[k]) ~= 'none' then return {'conflict'} end
end
local public, n = {}, tonumber(ARGV[6]) * 2
for i = 7, 6 + n do public[#public + 1] = ARGV[i] end
local private = {}
for i = 7 + n, #ARGV do private[#private + 1] = ARGV[i] end
redis.call('HSET', KEYS[3], 'id', ARGV[3], 'content', ARGV[4], unpack(public))
redis.call('HSET', KEYS[4], unpack(private))
redis.call('SADD', KEYS[6], ARGV[3])
redis.call('XADD', KEYS[5], 'MAXLEN', '~', 256, '*', 'type', 'queued', 'at', ARGV[5])
if ARGV[2] ~= '' then redis.call('XDEL', KEYS[2], ARGV[2]) end
if redis.call('DEL', KEYS[7]) == 1 then
  redis.call('HSET', KEYS[4], 'cancel', '1')
  return {'created_canceled'}
end
return {'created'}
