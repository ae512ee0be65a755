-- owner, request, lease ms, highest fence in the run's folder, an owner known to be dead ("": none), then limits and payload
-- folder as name and value in turn ("" for none)
-- -> 1, fence; or 0 and of the learner that holds the run: owner, renewals, request, milliseconds left
even_when_full()
local owner, request, now = ARGV[1], ARGV[2], now_ms()
local function held_by(field)
  return tonumber(call('HGET', LEARNER, field)) or 0
end
-- Cut the lease to its full length: after the clock was set back, a dead learner's would last until the clock caught up.
if held_by('expires') > now + ARGV[3] then call('HSET', LEARNER, 'expires', now + ARGV[3]) end
local left = held_by('expires') - now
local holder, predecessor = call('HGET', LEARNER, 'request'), call('HGET', LEARNER, 'owner')
if holder == request then return { 1, held_by('fence') } end -- the first reply was lost
if left > 0 and predecessor ~= ARGV[5] then return { 0, predecessor, held_by('renewals'), holder, left } end

apply_limits(ARGV, 6)
apply_limits(call('HGETALL', OVERRIDES), 1)

-- Above every fence that a learner of this run ever had: an emptied or restored server does not have them, the run's folder does.
local fence = math.max(held_by('fence'), tonumber(ARGV[4])) + 1
call('HSET', LEARNER, 'owner', owner, 'request', request, 'expires', now + ARGV[3], 'renewals', 0,
  'fence', string.format('%d', fence))
call('HSET', STATE, 'recovering', 1)
call('PUBLISH', ON_LEARNER, '')
return { 1, fence }
