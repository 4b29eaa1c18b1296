-- Delete reports that the leader has read. Their content stands in the records already.
-- KEYS  1 leader string   2 reports stream
-- ARGV  1 nonce   then entry ids
-- Reply {"acked"|"fenced"}: a former leader must not take a report from the one that waits for it.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {'fenced'} end
redis.call('XDEL', KEYS[2], unpack(ARGV, 2))
return {'acked'}
