-- owner, request, lease ms, then the limits as name and value in turn ("" for none)
-- -> 1, fence; or 0, owner, renewals and request of who holds the run, and the milliseconds left to them
even_when_full()
local owner, request, now = ARGV[1], ARGV[2], now_ms()
local left = math.min(get('learner_expires', 0) - now, tonumber(ARGV[3])) -- who waits looks again at least this often
local holder = call('HGET', STATE, 'learner_request')
if holder == request then return { 1, get('fence', 0) } end -- the reply was lost on its way
if left > 0 then return { 0, call('HGET', STATE, 'learner_owner'), get('learner_renewals', 0), holder, left } end

for index = 4, #ARGV, 2 do
  if ARGV[index + 1] == '' then call('HDEL', STATE, ARGV[index]) else call('HSET', STATE, ARGV[index], ARGV[index + 1]) end
end
local overrides = call('HGETALL', OVERRIDES)
for index = 1, #overrides, 2 do call('HSET', STATE, overrides[index], overrides[index + 1]) end

-- Above every fence that was ever given, also when this server was emptied or set back: it begins with the time.
local fence = math.max(get('fence', 0) + 1, now)
call('HSET', STATE, 'learner_owner', owner, 'learner_request', request, 'learner_expires', now + ARGV[3],
  'learner_renewals', 0, 'fence', string.format('%d', fence), 'recovering', 1)
call('PUBLISH', ON_LEARNER, '')
return { 1, fence }
