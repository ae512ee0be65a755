-- fence, step, version, num_groups, overtaken ("" for the limits' own)
-- -> group id, oldest version, version at commit, version at take; and so on
local lost = fence_lost(ARGV[1])
if lost then return lost end
even_when_full()
local step, version, num_groups = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local overtaken = ARGV[5] ~= '' and ARGV[5] or redis.call('HGET', STATE, 'overtaken')
local max_age = get('max_age', 0)
local oldest_fresh = version - max_age
local STALE_AT_ONCE = 256

collect_lost_leases()
for _, id in ipairs(redis.call('ZRANGEBYSCORE', READY, '-inf', '(' .. oldest_fresh, 'LIMIT', 0, STALE_AT_ONCE)) do
  drop(id, read(id), 'stale')
end

-- buffer/selection.py is this function in Python; docs/buffer.md has the proof.
local function choose(missing)
  local batch = redis.call('ZRANGEBYSCORE', READY, oldest_fresh, '+inf', 'LIMIT', 0, missing)
  if #batch < missing then return {} end
  if overtaken == 'wait' then
    local latest_deadline = tonumber(redis.call('ZSCORE', READY, batch[#batch])) + max_age
    for deadline = version, math.min(latest_deadline - 1, version + max_age) do
      local stragglers = redis.call('ZCOUNT', RESERVED, oldest_fresh, deadline - max_age)
      if stragglers > num_groups * (deadline - version) then return {} end
    end
  end
  return batch
end

local taken = redis.call('ZRANGEBYSCORE', TAKEN, step, step)
local missing = num_groups - #taken
if missing > 0 then
  local batch = choose(missing)
  if #batch == 0 then
    redis.call('HSET', STATE, 'wanted', missing)
    return {}
  end
  for _, id in ipairs(batch) do
    local record = read(id)
    record.taken = version
    write(id, record)
    redis.call('ZREM', READY, id)
    redis.call('ZADD', TAKEN, step, id)
    taken[#taken + 1] = id
  end
end
redis.call('HDEL', STATE, 'wanted')
local reply = {}
for _, id in ipairs(taken) do
  local record = read(id)
  for _, value in ipairs({ id, record.oldest, record.committed, record.taken }) do reply[#reply + 1] = value end
end
return reply
