-- worker, ticket id, reason, environment ("" before one is known) -> the reason, or how the ticket ended before
even_when_full()
local record = held(ARGV[2], ARGV[1])
if not record then return repeated_answer(ARGV[2]) end
if is_frozen() then return ARGV[3] end -- its lease expires after the recovery
record.environment = ARGV[4]
drop(ARGV[2], record, ARGV[3])
return ARGV[3]
