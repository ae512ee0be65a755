-- fence, step, version, num_groups, maximum of tokens (0 for none), 1 to wait for stragglers, the last version that this
-- learner published, the last step that it released
-- -> group id, oldest version, version at commit, version at take, task index, attempt; and so on
local step, version, num_groups = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local max_tokens, patient = tonumber(ARGV[5]), ARGV[6] == '1'
local max_age, selector = age_bound(), call('HGET', STATE, 'selector')
local oldest_fresh = version - max_age

-- Steps are consecutive, and a learner takes only after recovery. Otherwise this server has lost confirmed changes (a failover,
-- a backup): groups that were trained might be ready again, so nothing is returned before a recovery.
local last_step = get('step', step - 1)
local has_forgotten = get('live', -1) < tonumber(ARGV[7]) or get('released', -1) < tonumber(ARGV[8])
if step > last_step + 1 or has_forgotten or call('HEXISTS', STATE, 'recovering') == 1 then return redis.error_reply('REWOUND') end

local function described(groups)
  local reply = {}
  for _, group in ipairs(groups) do
    local record = group.record
    local values = { group.id, record.oldest, record.committed, record.taken, record.task, record.attempt }
    for _, value in ipairs(values) do reply[#reply + 1] = value end
  end
  return reply
end

local batch = read_all(call('ZRANGEBYSCORE', TAKEN, step, step))
if step <= last_step then
  for _, group in ipairs(batch) do
    if group.record.taken ~= version then -- a step was skipped, so the batch trains an earlier version
      group.record.taken = version
      write(group.id, group.record)
    end
  end
  return described(batch)
end

-- -- too old for these weights ---------------------------------------------------------------------------------------
local STALE_AT_ONCE = 32
collect_lost_leases()
for _, id in ipairs(call('ZRANGEBYSCORE', READY, '-inf', '(' .. oldest_fresh, 'LIMIT', 0, STALE_AT_ONCE)) do
  drop(id, read(id), 'stale')
end
for _, id in ipairs(call('ZRANGEBYSCORE', AGAIN, '-inf', '(' .. oldest_fresh, 'LIMIT', 0, STALE_AT_ONCE)) do
  local record = read(id)
  local last_use = record.steps[#record.steps]
  if last_use <= get('saved', -1) then
    spend(id, record)
  else -- back to taken: the checkpoint of its last step spends it
    leave(id, record)
    enter(id, record, 'taken', last_use)
  end
end

-- -- buffer/rules/selection.py is the rest in Python; docs/buffer.md has the proof ------------------------------------------
local quotas = cjson.decode(call('HGET', STATE, 'quotas') or '{}')
local SCANNED_MOST = 4 * num_groups + 256

local function oldest(set, most)
  return call('ZRANGEBYSCORE', set, oldest_fresh, '+inf', 'LIMIT', 0, most)
end

-- The latest version first, within it in the order of admission: else a task that is rolled again might never be taken.
local function freshest(set, most)
  local ids, below = {}, '+inf'
  while #ids < most do
    local version_there = call('ZREVRANGEBYSCORE', set, below, oldest_fresh, 'WITHSCORES', 'LIMIT', 0, 1)[2]
    if not version_there then break end
    for _, id in ipairs(call('ZRANGEBYSCORE', set, version_there, version_there, 'LIMIT', 0, most - #ids)) do ids[#ids + 1] = id end
    below = '(' .. version_there
  end
  return ids
end

local function candidates()
  local most = SCANNED_MOST
  if selector == 'uniform' or selector == 'prioritized' then return call('ZRANGE', LOTTERY, 0, most - 1) end
  if next(quotas) == nil then most = num_groups end
  local choose = selector == 'freshest' and freshest or oldest
  local ids = choose(READY, most)
  for _, id in ipairs(choose(AGAIN, most - #ids)) do ids[#ids + 1] = id end
  return ids
end

local chosen, skipped, tokens, of_environment, is_full = {}, {}, 0, {}, false
local function count_in(record)
  tokens = tokens + record.tokens
  of_environment[record.environment] = (of_environment[record.environment] or 0) + 1
end
local function add(group)
  if max_tokens > 0 and #batch + #chosen > 0 and tokens + group.record.tokens > max_tokens then
    is_full = true
    return
  end
  count_in(group.record)
  chosen[#chosen + 1] = group
  is_full = #batch + #chosen >= num_groups
end

for _, group in ipairs(batch) do count_in(group.record) end
for _, group in ipairs(read_all(candidates())) do
  if is_full then break end
  local record = group.record
  if record.oldest >= oldest_fresh then
    local quota = quotas[record.environment]
    if quota and (of_environment[record.environment] or 0) >= quota and record.oldest > oldest_fresh then
      skipped[#skipped + 1] = group
    else
      add(group)
    end
  end
end
-- Quotas and rates shape a batch; they never stop a run in which no other group can come.
local nothing_else_can_come = is_idle() and free_tickets() <= 0
if not is_full and nothing_else_can_come then
  for _, candidate in ipairs(skipped) do
    if is_full then break end
    add(candidate)
  end
end

local function must_wait()
  if not is_full then return true end
  if call('HEXISTS', STATE, 'samples_per_insert') == 1 and not nothing_else_can_come then
    if call('ZCARD', LOTTERY) < get('min_size', 1) or get('owed', 0) - #chosen < get('min_diff', 0) then return true end
  end
  if selector ~= 'windowed_fifo' or not patient then return false end
  local horizon = version - 1 -- the last version at which a chosen group could still be taken later
  for _, candidate in ipairs(chosen) do
    local is_first_use = #candidate.record.steps == 0
    horizon = math.max(horizon, is_first_use and candidate.record.oldest + max_age - 1 or version + max_age)
  end
  -- From this many steps ahead on, all groups in flight fit, whatever their deadlines.
  local enough = math.floor(call('ZCARD', RESERVED) / num_groups)
  for ahead = 0, math.min(horizon - version, max_age, enough) do
    if call('ZCOUNT', RESERVED, oldest_fresh, version + ahead - max_age) > num_groups * ahead then return true end
  end
  return false
end

if must_wait() then
  call('HSET', STATE, 'wanted', math.max(1, num_groups - #batch))
  return {}
end
if selector == 'uniform' or selector == 'prioritized' then
  local time = get('lottery_time', 0)
  for _, group in ipairs(chosen) do time = math.max(time, tonumber(call('ZSCORE', LOTTERY, group.id))) end
  call('HSET', STATE, 'lottery_time', string.format('%.17g', time))
end
-- The same as leave() and enter() for each group, in few commands.
local ids, places, records = {}, {}, {}
for index, group in ipairs(chosen) do
  local record = group.record
  record.state, record.taken = 'taken', version
  record.steps[#record.steps + 1] = step
  ids[index] = group.id
  places[2 * index - 1], places[2 * index] = step, group.id
  records[2 * index - 1], records[2 * index] = group.id, text_of(record)
  batch[#batch + 1] = group
end
for _, set in ipairs({ READY, AGAIN, LOTTERY }) do each_chunk(ids, function(...) call('ZREM', set, ...) end) end
each_chunk(places, function(...) call('ZADD', TAKEN, ...) end)
each_chunk(records, function(...) call('HSET', RECORDS, ...) end)
owe(-#chosen)
call('HSET', STATE, 'step', step)
call('HDEL', STATE, 'wanted')
call('PUBLISH', ON_EVENTS, 'taken ' .. step)
return described(batch)
