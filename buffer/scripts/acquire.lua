-- owner, request, lease ms, max_age, groups_per_step, lease_ms of tickets, max_attempts, overtaken
-- -> 1, fence; or 0, owner, renewals and request of who holds the run, and the milliseconds left to them
even_when_full()
local owner, request, now = ARGV[1], ARGV[2], now_ms()
local left = get('learner_expires', 0) - now
local holder = redis.call('HGET', STATE, 'learner_request')
if holder == request then return { 1, get('fence', 0) } end -- the reply was lost on its way
if left > 0 then
  return { 0, redis.call('HGET', STATE, 'learner_owner'), get('learner_renewals', 0), holder, left }
end
redis.call('HSET', STATE, 'learner_owner', owner, 'learner_request', request, 'learner_expires', now + ARGV[3],
  'learner_renewals', 0, 'max_age', ARGV[4], 'groups_per_step', ARGV[5], 'lease_ms', ARGV[6], 'max_attempts', ARGV[7],
  'overtaken', ARGV[8])
local fence = redis.call('HINCRBY', STATE, 'fence', 1)
redis.call('PUBLISH', ON_LEARNER, '')
wake_workers()
return { 1, fence }
