-- fence, ticket id, reason: quarantine a group that the learner has taken and cannot use
local step, record = call('ZSCORE', TAKEN, ARGV[2]), read(ARGV[2])
if not step or not record then return end
-- The step's batch is incomplete: the next `take` for it chooses another group.
if tonumber(step) == get('step', -1) then call('HSET', STATE, 'step', tonumber(step) - 1) end
record.steps[#record.steps] = nil -- it has not trained
owe(1)
quarantine(ARGV[2], record, ARGV[3], call('HGET', PAYLOADS, ARGV[2]) or '')
