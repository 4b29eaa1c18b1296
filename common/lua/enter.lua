-- A Celery task becomes a push: its entry in the jobs stream and a note of who waits, at once.
-- KEYS  1 jobs stream   2 celery hash
-- ARGV  1 id   2 context bytes   3.. push field, value …
-- Reply {"entered", entry} | {"known"}: it was pushed before, and its end is still to be told.
-- The first write is an XADD, so that a Redis at maxmemory refuses it here.
if redis.call('HEXISTS', KEYS[2], ARGV[1]) == 1 then return {'known'} end
local fields = {}
for i = 3, #ARGV do fields[#fields + 1] = ARGV[i] end
local entry = redis.call('XADD', KEYS[1], '*', 'id', ARGV[1], unpack(fields))
redis.call('HSET', KEYS[2], ARGV[1], entry .. ' ' .. ARGV[2])
return {'entered', entry}
