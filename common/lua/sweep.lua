-- Delete what a job has left behind: a staged file, or a spilled state.
-- KEYS  1 staged string, or spilled state (a hash)   2 trajectory hash of the job in its name
-- ARGV  1 "1" does it, "0" only says
-- Reply {"swept"} | {"live"}: its job has not ended | {"gone"}. Its write is a delete.
if redis.call('EXISTS', KEYS[1]) == 0 then return {'gone'} end
if redis.call('EXISTS', KEYS[2]) == 1 then return {'live'} end
if ARGV[1] == '1' then redis.call('UNLINK', KEYS[1]) end
return {'swept'}
