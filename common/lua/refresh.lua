-- Bring the public record of waiting jobs up to date; a job that has ended is passed over.
-- KEYS  1 leader string   then job hashes
-- ARGV  1 nonce   2 as of (ms)   then per job: queue position or "", slack (s), eta (ms)
-- Reply {"ok"|"fenced"}. The first write is a delete.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {'fenced'} end
for j = 2, #KEYS do
  local a = 2 + 3 * (j - 2)
  if redis.call('HGET', KEYS[j], 'is_terminal') == '0' then
    redis.call('HDEL', KEYS[j], 'queue_position')
    redis.call('HSET', KEYS[j], 'slack', ARGV[a + 2], 'eta', ARGV[a + 3], 'as_of', ARGV[2])
    if ARGV[a + 1] ~= '' then redis.call('HSET', KEYS[j], 'queue_position', ARGV[a + 1]) end
  end
end
return {'ok'}
