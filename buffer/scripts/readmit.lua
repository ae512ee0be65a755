-- ticket id, oldest version, newest version, tokens, payload -> "stored", or the reason why not
-- Makes a quarantined group ready. Its task may have been rolled again meanwhile; that is another group.
local id, oldest, newest = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local found = call('HGET', QUARANTINE, id)
if not found then return 'it is not in quarantine' end
if newest > get('live', -1) then return string.format('its newest token is above the live version %d', get('live', -1)) end
local report = cjson.decode(found)
call('HSET', PAYLOADS, id, ARGV[5])
call('HINCRBY', STATE, 'bytes', #ARGV[5])
call('HINCRBY', STATE, 'quarantined', -1)
call('HINCRBY', STATE, 'readmitted', 1)
call('HDEL', ENDED, id)
forget_report(id)
local record = {
  task = report.task, attempt = 1, failures = 0, version = oldest, oldest = oldest, committed = get('live', -1), taken = -1,
  tokens = tonumber(ARGV[4]), steps = {}, worker = report.worker, environment = report.environment,
}
count_tokens('generated', record.tokens)
enter(id, record, 'ready', oldest)
owe(get('samples_per_insert', 0))
record_event('stored', id, record)
wake_learner()
return 'stored'
