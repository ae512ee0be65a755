-- "" or "everything" -> name and value in turn
-- with "everything" then each set (in the order of rules/ticket_record.py) as ticket and score, the records as ticket and text, the payloads as ticket and size in turn
-- A user who may only read cannot collect lost leases, and sees those tickets as reserved.
if type(redis.pcall('HDEL', STATE, '')) == 'number' then collect_lost_leases() end
local reply = {}
local function say(name, value)
  reply[#reply + 1] = name
  reply[#reply + 1] = value
end
for name, set in pairs(SETS) do say(name, call('ZCARD', set)) end
for _, name in ipairs({ 'spent', 'lost_to_rollback', 'quarantined', 'issued', 'bytes', 'expired', 'starving' }) do
  say(name, get(name, 0))
end
say('version', get('live', -1))
say('slots', slots())
say('slots_used', slots_used())
say('owed', tostring(get('owed', 0)))
say('dropped', call('HGETALL', DROPPED))

local tokens = {}
for _, fate in ipairs({ 'generated', 'trained', 'quarantined', 'stale', 'lease_lost', 'no_signal', 'failed', 'abandoned', 'detached' }) do
  tokens[#tokens + 1] = fate
  tokens[#tokens + 1] = get('tokens:' .. fate, 0)
end
say('tokens', tokens)

-- Ready groups by version: the newest 64 versions one by one, older groups together under the oldest version.
local versions, live = {}, get('live', -1)
local oldest = tonumber(call('ZRANGE', READY, 0, 0, 'WITHSCORES')[2])
if oldest then
  local first = math.max(oldest, live - 63)
  for offset = 0, math.min(63, live - first) do -- counted from 0: adding 1 to a corrupt score of 1e300 would loop for ever
    local version = first + offset
    local count = call('ZCOUNT', READY, version == first and '-inf' or version, version)
    if count > 0 then
      versions[#versions + 1] = version == first and oldest or version
      versions[#versions + 1] = count
    end
  end
end
say('ready_by_version', versions)

if ARGV[1] == 'everything' then
  for _, set in ipairs({ LEASES, RESERVED, READY, AGAIN, TAKEN, KEPT, LOTTERY }) do
    reply[#reply + 1] = call('ZRANGE', set, 0, -1, 'WITHSCORES')
  end
  reply[#reply + 1] = call('HGETALL', RECORDS)
  local sizes = {}
  for _, id in ipairs(call('HKEYS', PAYLOADS)) do
    sizes[#sizes + 1] = id
    sizes[#sizes + 1] = call('HSTRLEN', PAYLOADS, id)
  end
  reply[#reply + 1] = sizes
end
return reply
