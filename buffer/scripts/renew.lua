-- worker, ticket ids... -> the ids that are no longer this worker's
even_when_full()
local expires, lost = now_ms() + get('lease_ms', 0), {}
for index = 2, #ARGV do
  if held(ARGV[index], ARGV[1]) then
    call('ZADD', LEASES, expires, ARGV[index])
  else
    lost[#lost + 1] = ARGV[index]
  end
end
return lost
