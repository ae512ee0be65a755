-- fence, the learner's version -> the next version; a repeated call returns the same
local after = tonumber(ARGV[2])
local highest = get('highest', -1)
local version = highest == after + 1 and highest or math.max(highest, after) + 1
call('HSET', STATE, 'highest', version)
return version
