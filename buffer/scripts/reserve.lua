-- worker, request, version, count -> ticket id, task index, version, attempt; and so on
local worker, request, version, count = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])

local function describe(numbers)
  local tickets = {}
  for _, number in ipairs(numbers) do
    local id = string.format('t%09d', number)
    local record = held(id, worker)
    if record then
      for _, value in ipairs({ id, record.task, record.version, record.attempt }) do tickets[#tickets + 1] = value end
    end
  end
  return tickets
end

local function range(first, length)
  local numbers = {}
  for offset = 0, length - 1 do numbers[#numbers + 1] = first + offset end
  return numbers
end

-- The reply to this very request was lost on its way: give the same tickets again.
local last, first, length = string.match(redis.call('HGET', REQUESTS, worker) or '', '^(%S+) (%d+) (%d+)$')
if last == request then
  local again = describe(range(tonumber(first), tonumber(length)))
  if #again > 0 then return again end
end

-- Refused by a full server, and with it the whole script: a reservation is no reason to take the last memory.
redis.call('HSET', STATE, 'full', 0)
collect_lost_leases()

local live, max_age = get('live', -1), get('max_age', -1)
if max_age < 0 or live < 0 or version < live then return {} end
count = math.min(count, (max_age + 1) * get('groups_per_step', 0) - slots_used())
if count <= 0 then return {} end

local start, expires = get('next_ticket', 0), now_ms() + get('lease_ms', 0)
for _, number in ipairs(range(start, count)) do
  local id = string.format('t%09d', number)
  local task, attempt, failures = string.match(redis.call('LPOP', REDO) or '', '^(%d+) (%d+) (%d+)$')
  if not task then task, attempt, failures = redis.call('HINCRBY', STATE, 'next_task', 1) - 1, 1, 0 end
  write(id, { task = task, attempt = attempt, failures = failures, version = live, oldest = -1, committed = -1, taken = -1, worker = worker })
  redis.call('ZADD', LEASES, expires, id)
  redis.call('ZADD', RESERVED, live, id)
  if number >= ENDED_REMEMBERED then redis.call('HDEL', ENDED, string.format('t%09d', number - ENDED_REMEMBERED)) end
end
redis.call('HINCRBY', STATE, 'next_ticket', count)
redis.call('HINCRBY', STATE, 'issued', count)
redis.call('HSET', REQUESTS, worker, string.format('%s %d %d', request, start, count))
redis.call('EXPIRE', REQUESTS, 3600)
return describe(range(start, count))
