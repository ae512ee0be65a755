-- id of the latest change that the caller has read ("" before the first), the change
-- -> the change as "AT ID JSON"; "" if the mix has changed since, or while a learner recovers; "full"
local CHANGES_MOST = 4096 -- buffer/mix_log.py has the same
even_when_full()
local known, change = ARGV[1], ARGV[2]
local function line(at)
  return string.format('%d %s %s', at, redis.sha1hex(string.format('%s %d %s', known, at, change)), change)
end
local at, id = latest_change()
local again = at and line(at)
if again and again == call('LINDEX', MIX, -1) then return again end -- the first reply was lost
if id ~= known or call('HEXISTS', STATE, 'recovering') == 1 then return '' end
if call('LLEN', MIX) >= CHANGES_MOST then return 'full' end
local entry = line(get('next_task', 0))
call('RPUSH', MIX, entry)
return entry
