-- Take, keep or give up leadership. A nonce is "{process}:{term}"; a process takes a new term each
-- time it reads the records, so that what it sent before and arrives late finds itself fenced.
-- KEYS  1 leader string
-- ARGV  1 nonce   2 lease (ms); 0 gives it up
-- Reply {"leading"} anew | {"renewed"} | {"standby"} | {"released"}. The first write is no HSET or SET (maxmemory).
local now = redis.call('GET', KEYS[1])
if ARGV[2] == '0' then
  if now == ARGV[1] then redis.call('DEL', KEYS[1]) end
  return {'released'}
end
if now == ARGV[1] then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return {'renewed'}
end
if now then
  local process, term = string.match(now, '^(.*):(%d+)$')
  local own, next_term = string.match(ARGV[1], '^(.*):(%d+)$')
  if process ~= own or tonumber(term) > tonumber(next_term) then return {'standby'} end
end
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {'leading'}
