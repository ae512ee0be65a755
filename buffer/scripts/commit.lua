-- worker, ticket id, oldest version, newest version, tokens, environment, payload -> what became of it
local worker, id, oldest, newest = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local record = held(id, worker)
if not record then return answer_again(id) end

local live = get('live', -1)
record.environment = ARGV[6]
if oldest < record.version or newest > live then
  even_when_full()
  quarantine(id, record, oldest < record.version
    and string.format("its oldest token is of version %d, before its ticket's version %d", oldest, record.version)
    or string.format('its newest token is of version %d, above the live version %d', newest, live), ARGV[7])
  return 'quarantined'
end

-- First, so that a full server refuses the script as a whole.
call('HSET', PAYLOADS, id, ARGV[7])
call('HINCRBY', STATE, 'bytes', #ARGV[7])
leave(id, record)
record.oldest, record.committed, record.tokens = oldest, live, tonumber(ARGV[5])
enter(id, record, 'ready', oldest)
owe(get('samples_per_insert', 0))
tell('stored', id, record)
count(record, 'tokens', record.tokens)
count(record, 'bytes', #ARGV[7])
wake_learner()
return 'stored'
