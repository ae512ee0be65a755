-- worker, ticket id, oldest version, newest version, payload -> what became of it
local worker, id, oldest, newest = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local record = held(id, worker)
if not record then return answer_again(id) end

local live = get('live', -1)
if oldest < record.version or newest > live then
  even_when_full()
  quarantine(id, record, oldest < record.version
    and string.format("its oldest token is of version %d, before its ticket's version %d", oldest, record.version)
    or string.format('its newest token is of version %d, above the live version %d', newest, live), '')
  return 'quarantined'
end

-- First, so that a full server refuses the script as a whole.
redis.call('HSET', PAYLOADS, id, ARGV[5])
redis.call('HINCRBY', STATE, 'bytes', #ARGV[5])
redis.call('ZREM', LEASES, id)
redis.call('ZREM', RESERVED, id)
redis.call('ZADD', READY, oldest, id)
record.oldest, record.committed = oldest, live
write(id, record)
wake_learner()
return 'stored'
