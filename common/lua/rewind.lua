-- Send a job whose state is lost back to its first stage: nothing of it is left to go on from.
-- KEYS  1 leader string   2 trajectory hash   3 job hash   4 events stream
--       then per worker that could free what is left: worker hash, its stream
-- ARGV  1 nonce   2 at (ms)
-- Reply {"rewound"} | {"late"}: it waits for a task, or has ended | {"fenced"}
-- A repeat changes nothing. The first write is a delete.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {'fenced'} end
local have = redis.call('HMGET', KEYS[2], 'seq', 'handles', 'stage')
if have[1] ~= '0' then return {'late'} end
redis.call('HDEL', KEYS[2], 'error_code', 'error')
redis.call('HSET', KEYS[2], 'stage', 'encode', 'step', '0', 'handles', '', 'outputs', '')
redis.call('HSET', KEYS[3], 'stage', 'encode', 'step', '0', 'progress', '0.000')
if have[3] ~= 'encode' then
  redis.call('XADD', KEYS[4], 'MAXLEN', '~', 256, '*', 'type', 'rewound', 'at', ARGV[2])
end
if have[2] and have[2] ~= '' then
  for k = 5, #KEYS, 2 do
    if redis.call('EXISTS', KEYS[k]) == 1 then
      redis.call('XADD', KEYS[k + 1], '*', 'kind', 'free', 'body', have[2])
      if redis.call('PTTL', KEYS[k + 1]) < 0 then
        redis.call('PEXPIRE', KEYS[k + 1], 10 * math.max(1000, redis.call('PTTL', KEYS[k])))
      end
      break
    end
  end
end
return {'rewound'}
