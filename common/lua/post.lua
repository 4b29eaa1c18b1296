-- An outbox entry becomes what is owed for it: a delivery for each who is to be told.
-- KEYS  1 sender string   2 outbox stream   3 deliveries sorted set   then per delivery: its hash
-- ARGV  1 nonce   2 entry id   3 at (ms), when they are due too   4 ttl (ms)
--       then per delivery: name, kind, job, url, body
-- Reply {"posted"|"gone"|"fenced"}; gone: it was posted before. The first write is a delete.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {'fenced'} end
if redis.call('XDEL', KEYS[2], ARGV[2]) == 0 then return {'gone'} end
for i = 1, #KEYS - 3 do
  local at = 5 * i
  redis.call('HSET', KEYS[3 + i], 'kind', ARGV[at + 1], 'job', ARGV[at + 2], 'url', ARGV[at + 3],
    'body', ARGV[at + 4], 'created', ARGV[3], 'attempts', '0', 'error', '')
  redis.call('PEXPIRE', KEYS[3 + i], ARGV[4])
  redis.call('ZADD', KEYS[3], ARGV[3], ARGV[at])
end
return {'posted'}
