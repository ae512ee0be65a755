-- worker, ticket id, reason, environment ("" if it has none yet) -> "dropped", or what became of the ticket before
even_when_full()
local record = held(ARGV[2], ARGV[1])
if not record then return answer_again(ARGV[2]) end
if is_frozen() then return 'dropped' end -- its lease ends later
record.environment = ARGV[4]
drop(ARGV[2], record, ARGV[3])
return 'dropped'
