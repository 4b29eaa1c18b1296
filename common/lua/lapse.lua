-- Give a key that nobody needs for longer the TTL that it should have.
-- KEYS  1 the key   then trajectory and worker hashes: while one of them is there, it needs the key
-- ARGV  1 ttl (ms)   2 "1" does it, "0" only says
-- Reply {"lapsed"} | {"live"}: somebody needs it | {"fine"}: it goes as soon by itself | {"gone"}
local left = redis.call('PTTL', KEYS[1])
if left == -2 then return {'gone'} end
if left >= 0 and left <= tonumber(ARGV[1]) then return {'fine'} end
for k = 2, #KEYS do
  if redis.call('EXISTS', KEYS[k]) == 1 then return {'live'} end
end
if ARGV[2] == '1' then redis.call('PEXPIRE', KEYS[1], ARGV[1]) end
return {'lapsed'}
