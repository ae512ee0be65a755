-- fence, step, highest version, next ticket, next task, number of redo entries, these ("task attempt failures"),
-- then the outstanding tickets ("number task attempt failures") -> highest version, groups returned, groups spent
local lost = fence_lost(ARGV[1])
if lost then return lost end
even_when_full()
local step, version, next_ticket, next_task = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local first_outstanding = 7 + tonumber(ARGV[6])

local outstanding = {}
for index = first_outstanding, #ARGV do outstanding[tonumber(string.match(ARGV[index], '^%d+'))] = true end

-- The checkpoint says which tickets had ended, even if this server, restored from a backup, does not know.
local spent, returned = 0, 0
for _, id in ipairs(redis.call('HKEYS', RECORDS)) do
  local number, taken_for = ticket_number(id), tonumber(redis.call('ZSCORE', TAKEN, id) or nil)
  if (taken_for and taken_for <= step) or (number < next_ticket and not outstanding[number]) then
    spend(id)
    spent = spent + 1
  elseif taken_for then
    local record = read(id)
    record.taken = -1
    write(id, record)
    redis.call('ZREM', TAKEN, id)
    redis.call('ZADD', READY, record.oldest, id)
    returned = returned + 1
  end
end

local own_next = get('next_ticket', 0)
if own_next < next_ticket then -- the server is older than the checkpoint, or empty
  redis.call('DEL', REDO)
  for index = 7, first_outstanding - 1 do redis.call('RPUSH', REDO, ARGV[index]) end
  for index = first_outstanding, #ARGV do
    local number, task, attempt, failures = string.match(ARGV[index], '^(%d+) (%d+) (%d+) (%d+)$')
    if tonumber(number) >= own_next then redis.call('RPUSH', REDO, string.format('%d %d %d', task, attempt + 1, failures)) end
  end
end

local highest = math.max(get('highest', -1), version)
redis.call('HSET', STATE, 'released', step, 'highest', highest, 'next_ticket', math.max(own_next, next_ticket),
  'next_task', math.max(get('next_task', 0), next_task))
wake_workers()
return { highest, returned, spent }
