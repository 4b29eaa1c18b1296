-- A worker that has handed everything back goes; also what the leader does for a dead one.
-- KEYS  1 worker hash   2 workers set   3 tasks stream   4 reports stream
-- ARGV  1 name   2 tell "1"|"0"   3 why, if it took itself out
-- Reply {"left", body of each free message that nobody has read …} | {"alive"}: the leader believed
-- it dead, and it has registered again
if ARGV[2] == '0' and redis.call('EXISTS', KEYS[1]) == 1 then return {'alive'} end
local reply = {'left'}
for _, entry in ipairs(redis.call('XRANGE', KEYS[3], '-', '+')) do
  local fields = entry[2]
  if fields[2] == 'free' then reply[#reply + 1] = fields[4] end
end
redis.call('DEL', KEYS[1])
redis.call('DEL', KEYS[3])
redis.call('SREM', KEYS[2], ARGV[1])
if ARGV[2] == '1' then
  local bye = {'kind', 'bye', 'worker', ARGV[1]}
  if ARGV[3] ~= '' then bye[5], bye[6] = 'why', ARGV[3] end
  redis.call('XADD', KEYS[4], '*', unpack(bye))
end
return reply
