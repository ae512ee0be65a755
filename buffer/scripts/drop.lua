-- worker, ticket id, reason, environment ("" before one is known), tokens generated for it -> the reason, or how the ticket ended before
even_when_full()
local record = held(ARGV[2], ARGV[1])
if not record then return repeated_answer(ARGV[2]) end
if is_frozen() then return ARGV[3] end -- its lease expires after the recovery
record.environment, record.tokens = ARGV[4], tonumber(ARGV[5]) or 0
count_tokens('generated', record.tokens)
drop(ARGV[2], record, ARGV[3])
return ARGV[3]
