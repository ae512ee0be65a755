-- worker, ticket id, oldest version, newest version, tokens, environment -> the commit's result
-- The same transaction has stored the payload with HSETNX before: bytes that pass through Lua are copied twice more.
local worker, id, oldest, newest = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local record = held(id, worker)
if not record then
  local owner = read(id)
  if not owner or owner.state == 'reserved' then call('HDEL', PAYLOADS, id) end -- the payload of a lost ticket
  return repeated_answer(id)
end

local size = call('HSTRLEN', PAYLOADS, id)
call('HINCRBY', STATE, 'bytes', size)
local live = get('live', -1)
record.environment = ARGV[6]
if oldest < record.version or newest > live then
  if is_frozen() then return 'quarantined' end -- its lease expires after the recovery
  quarantine(id, record, oldest < record.version
    and string.format("its oldest token is of version %d, before its ticket's version %d", oldest, record.version)
    or string.format('its newest token is of version %d, above the live version %d', newest, live), call('HGET', PAYLOADS, id))
  return 'quarantined'
end

leave(id, record)
record.oldest, record.committed, record.tokens = oldest, live, tonumber(ARGV[5])
count_tokens('generated', record.tokens)
enter(id, record, 'ready', oldest)
owe(get('samples_per_insert', 0))
record_event('stored', id, record)
count(record, 'tokens', record.tokens)
count(record, 'bytes', size)
wake_learner()
return 'stored'
