-- Delete what a job has left behind: a staged file, or a spilled state.
-- KEYS  1 active set   2 staged string, or spilled state (a hash; its fields "c:…" name who holds it)
--       3 trajectory hash of the job in its name
-- ARGV  1 "1" does it, "0" only says
-- Reply {"swept"} | {"live"}: a job that it belongs to has not ended | {"gone"}. Its write is a delete.
local kind = redis.call('TYPE', KEYS[2]).ok
if kind == 'none' then return {'gone'} end
if redis.call('EXISTS', KEYS[3]) == 1 then return {'live'} end
if kind == 'hash' then
  for _, field in ipairs(redis.call('HKEYS', KEYS[2])) do
    if string.sub(field, 1, 2) == 'c:'
      and redis.call('SISMEMBER', KEYS[1], redis.call('HGET', KEYS[2], field)) == 1 then
      return {'live'}
    end
  end
end
if ARGV[1] == '1' then redis.call('UNLINK', KEYS[2]) end
return {'swept'}
