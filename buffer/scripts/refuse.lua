-- fence, ticket id, reason, head of the payload: the learner cannot use a group that it has taken
local lost = fence_lost(ARGV[1])
if lost then return lost end
even_when_full()
local record = redis.call('ZSCORE', TAKEN, ARGV[2]) and read(ARGV[2])
if record then quarantine(ARGV[2], record, ARGV[3], ARGV[4]) end
