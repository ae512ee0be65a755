-- worker, ticket id, reason, environment, payload -> what became of it
even_when_full()
local record = held(ARGV[2], ARGV[1])
if not record then return answer_again(ARGV[2]) end
if is_frozen() then return 'quarantined' end -- its lease ends later
record.environment = ARGV[4]
quarantine(ARGV[2], record, ARGV[3], ARGV[5])
return 'quarantined'
