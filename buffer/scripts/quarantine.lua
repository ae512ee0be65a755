-- worker, ticket id, reason, environment, payload -> the commit's result
even_when_full()
local record = held(ARGV[2], ARGV[1])
if not record then return repeated_answer(ARGV[2]) end
if is_frozen() then return 'quarantined' end -- its lease expires after the recovery
record.environment = ARGV[4]
quarantine(ARGV[2], record, ARGV[3], ARGV[5])
return 'quarantined'
