-- Shared by the buffer's scripts: ticket records and state changes. buffer/server/scripts.py prepends the parts that a script uses
-- and declares the keys that it touches: STATE is the run's key `state`, ON_READY its channel `on:ready`.
local AT_ONCE = 128 -- tickets that one call may end in addition to its own work
local ENDED_REMEMBERED = 10000
local QUARANTINE_KEPT, QUARANTINE_BYTES = 100, 16 * 1024 * 1024

local call = redis.call

local function get(field, default)
  return tonumber(call('HGET', STATE, field)) or default
end

local function now_ms()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- A full server refuses a script whose first write may take memory, but not writes that follow a deletion.
-- Called by scripts that free memory in the end, or keep a lease alive.
local function even_when_full()
  call('HDEL', STATE, '')
end

-- The error for a learner that is not the latest; scripts.py begins each script of the learner with this check. REWOUND: the
-- server has a smaller fence or none, so it was emptied or restored from a backup while the learner lives.
local function fence_lost(fence)
  local current = call('HGET', LEARNER, 'fence')
  if fence == current then return nil end
  if (tonumber(current) or 0) < tonumber(fence) then return redis.error_reply('REWOUND') end
  return redis.error_reply('FENCELOST ' .. current)
end

-- The error for a server that has lost steps: groups that were trained would be trained again.
local function step_lost(step)
  if tonumber(step) > get('step', tonumber(step)) then return redis.error_reply('REWOUND') end
end

-- Limits as name and value in turn, from `first` on; "" removes one.
local function apply_limits(limits, first)
  for index = first, #limits, 2 do
    local name, value = limits[index], limits[index + 1]
    if value == '' then call('HDEL', STATE, name) elseif value ~= 'auto' then call('HSET', STATE, name, value) end
  end
end

-- The largest age that a group may have: max_age may be fractional (for the slots), ages are whole.
local function age_bound()
  return math.ceil(get('max_age', 0))
end

local function slots()
  local groups, pace = get('groups_per_step', 0), get('pace', nil)
  local most = math.floor((get('max_age', -1) + 1) * groups)
  return pace and math.min(most, math.floor(pace * groups + 1e-6)) or most
end

local function in_training()
  return call('ZCOUNT', TAKEN, get('released', -1) + 1, '+inf')
end

-- Groups in training count whether they train for the first time or again: docs/buffer.md has the arithmetic.
local function slots_used()
  return call('ZCARD', RESERVED) + call('ZCARD', READY) + in_training()
end

-- Nothing is being rolled out or trained.
local function is_idle()
  return call('ZCARD', RESERVED) == 0 and in_training() == 0
end

-- Tickets that may be issued, by the slots and by how far inserts may run ahead of samples.
local function free_tickets()
  local free, samples_per_insert = slots() - slots_used(), get('samples_per_insert', nil)
  if not samples_per_insert then return free end
  local room = math.floor((get('max_diff', 0) - get('owed', 0)) / samples_per_insert) - call('ZCARD', RESERVED)
  if is_idle() then -- the rate limiter alone never blocks the next step
    room = math.max(room, math.max(get('groups_per_step', 1), get('min_size', 1)) - call('ZCARD', LOTTERY))
  end
  return math.min(free, room)
end

-- -- records: buffer/rules/ticket_record.py reads and writes the same ------------------------------------------------------------
local function ticket_number(id)
  return tonumber(string.sub(id, 2))
end

local function ticket_id(number)
  return string.format('t%09d', number)
end

local FIELDS = '^(%a+) (%d+) (%d+) (%d+) (%d+) (%-?%d+) (%-?%d+) (%-?%d+) (%d+) (%S+) ([^\t]*)\t(.*)$'
local function record_of(text)
  local state, task, attempt, failures, version, oldest, committed, taken, tokens, steps, worker, environment =
    string.match(text or '', FIELDS)
  if not state then return nil end
  local used = {}
  for step in string.gmatch(steps, '%d+') do used[#used + 1] = tonumber(step) end
  return {
    state = state, task = tonumber(task), attempt = tonumber(attempt), failures = tonumber(failures),
    version = tonumber(version), oldest = tonumber(oldest), committed = tonumber(committed), taken = tonumber(taken),
    tokens = tonumber(tokens), steps = used, worker = worker, environment = environment,
  }
end

local function text_of(record)
  return string.format('%s %d %d %d %d %d %d %d %d %s %s\t%s', record.state, record.task, record.attempt, record.failures,
    record.version, record.oldest, record.committed, record.taken, record.tokens,
    #record.steps > 0 and table.concat(record.steps, ',') or '-', record.worker, record.environment)
end

local function read(id)
  return record_of(call('HGET', RECORDS, id))
end

local function write(id, record)
  call('HSET', RECORDS, id, text_of(record))
end

-- The latest change of the mix of environments: the first task that it applies to, its id ("" before the first), its content.
-- Workers may read but not write it, so its key is not declared: the server requires write permission for declared keys.
local function latest_change()
  local mix = string.gsub(STATE, 'state$', 'mix')
  local at, id, change = string.match(call('LINDEX', mix, -1) or '', '^(%d+) (%x+) (.*)$')
  return tonumber(at), id or '', change
end

-- Lua can pass only a limited number of arguments to a command.
local function each_chunk(list, act)
  for first = 1, #list, 1000 do act(unpack(list, first, math.min(first + 999, #list))) end
end

-- The groups of these tickets that have a valid record, in the same order.
local function read_all(ids)
  local groups = {}
  for first = 1, #ids, 1000 do
    local last = math.min(first + 999, #ids)
    local texts = call('HMGET', RECORDS, unpack(ids, first, last))
    for index, text in ipairs(texts) do
      local record = record_of(text)
      if record then groups[#groups + 1] = { id = ids[first + index - 1], record = record } end
    end
  end
  return groups
end

-- The record of a ticket that this worker may still commit.
local function held(id, worker)
  local record = read(id)
  if record and record.state == 'reserved' and record.worker == worker then return record end
end

local function repeated_answer(id)
  local record = read(id)
  if record then return record.state == 'reserved' and 'lease_lost' or 'already' end
  local answer = call('HGET', ENDED, id) or 'lease_lost'
  return answer == 'undone' and 'already' or answer
end

-- -- notifications and counters --------------------------------------------------------------------------------------
local WOKEN_MOST = 1000
-- Notify commits that wait for memory, and the workers whose turn it is: as many as there are free slots, in the order of the
-- queue, each on its own channel. The others would ask and find nothing. Operators may read but not write the queue, so its key
-- is not declared.
local function wake_workers()
  call('PUBLISH', ON_SLOTS, '')
  local free = math.min(free_tickets(), WOKEN_MOST)
  if not (free >= 1) then return end -- also for what is no number
  local queue = string.gsub(STATE, 'state$', 'waiting')
  for _, worker in ipairs(call('ZRANGE', queue, 0, free - 1)) do call('PUBLISH', ON_SLOTS .. ':' .. worker, '') end
end

-- Notify the learner if it waits and the groups that it wants are there; `wanted` is set while it waits.
local function wake_learner()
  local wanted = get('wanted', nil)
  if wanted and call('ZCARD', LOTTERY) >= wanted then call('PUBLISH', ON_READY, '') end
end

local function count(record, what, number)
  call('HINCRBY', TALLY, 'environment|' .. record.environment .. '|' .. what, number)
  call('HINCRBY', TALLY, 'worker|' .. record.worker .. '|' .. what, number)
end

local function record_event(event, id, record)
  call('PUBLISH', ON_EVENTS, event .. ' ' .. id)
  count(record, event, 1)
end

-- -- weighted draw (buffer/rules/weighted_draw.py): a group's key is the draw's time plus an exponential wait whose rate is its
-- weight. Taking the smallest keys samples without replacement in proportion to the weights. --------------------------
local function weight_of(id)
  if call('HGET', STATE, 'selector') == 'uniform' then return 1 end
  return tonumber(call('HGET', WEIGHTS, id)) or 1
end

local function enter_draw(id, record)
  local chance = (tonumber(string.sub(redis.sha1hex(id .. '/' .. #record.steps), 1, 13), 16) + 1) / 4503599627370497
  call('ZADD', LOTTERY, string.format('%.17g', get('lottery_time', 0) - math.log(chance) / weight_of(id)), id)
end

-- -- changes of state ------------------------------------------------------------------------------------------------
local SETS = { reserved = RESERVED, ready = READY, again = AGAIN, taken = TAKEN, kept = KEPT }

local function leave(id, record)
  call('ZREM', SETS[record.state], id)
  if record.state == 'reserved' then call('ZREM', LEASES, id) end
  if record.state == 'ready' or record.state == 'again' then call('ZREM', LOTTERY, id) end
end

local function enter(id, record, state, score)
  record.state = state
  call('ZADD', SETS[state], score, id)
  if state == 'ready' or state == 'again' then enter_draw(id, record) end
  write(id, record)
end

local function owe(uses)
  if tonumber(uses) ~= 0 and call('HEXISTS', STATE, 'samples_per_insert') == 1 then call('HINCRBYFLOAT', STATE, 'owed', uses) end
end

local function delete_payload(id)
  local size = call('HSTRLEN', PAYLOADS, id)
  if size > 0 then
    call('HDEL', PAYLOADS, id)
    call('HINCRBY', STATE, 'bytes', -size)
  end
end

-- Settle `owed` for a group that ends: unused samples are no longer owed; uses beyond samples_per_insert are carried over
-- until groups with fewer uses offset them.
local function settle_debt(uses)
  local samples_per_insert = get('samples_per_insert', nil)
  if not samples_per_insert then return end
  local unused, debt = samples_per_insert - uses, get('debt', 0)
  local new_debt = math.min(0, debt + unused)
  call('HSET', STATE, 'debt', string.format('%.17g', new_debt))
  owe(string.format('%.17g', new_debt - debt - unused))
end

-- Tokens by fate, prompts included. Those that were generated and have no other fate are in flight.
local function count_tokens(fate, tokens)
  if tokens > 0 then call('HINCRBY', STATE, 'tokens:' .. fate, tokens) end
end

-- End a ticket: what remains is its counts and, for a while, the answer to a repeated commit.
local function close(id, record, answer, fate)
  leave(id, record)
  count_tokens(fate, record.tokens)
  call('HDEL', WEIGHTS, id)
  if record.state ~= 'reserved' then settle_debt(#record.steps) end
  -- reserve.lua deletes the answer of the ticket this many numbers behind; one that ends even later is not remembered.
  if ticket_number(id) > get('next_ticket', 0) - ENDED_REMEMBERED then call('HSET', ENDED, id, answer) end
end

local function discard(id)
  delete_payload(id)
  call('HDEL', RECORDS, id)
end

-- Delete kept groups before the learner has discarded them.
local function expire(ids)
  for _, id in ipairs(ids) do
    call('ZREM', KEPT, id)
    discard(id)
  end
  call('HINCRBY', STATE, 'expired', #ids)
end

local function spend(id, record)
  call('HINCRBY', STATE, 'spent', 1)
  record_event('spent', id, record)
  close(id, record, 'already', 'trained')
  if get('keep_steps', 0) > 0 and call('HEXISTS', PAYLOADS, id) == 1 then
    enter(id, record, 'kept', record.steps[#record.steps] or math.max(get('saved', 0), 0))
  else
    discard(id)
  end
end

local function roll_again(record, failed)
  local failures = record.failures + (failed and 1 or 0)
  if failed and failures >= get('max_attempts', 1) then return call('HINCRBY', STATE, 'untrained', 1) end
  call('RPUSH', REDO, string.format('%d %d %d', record.task, record.attempt + 1, failures))
end

local function drop(id, record, reason)
  call('HINCRBY', DROPPED, reason, 1)
  record_event('dropped:' .. reason, id, record)
  close(id, record, reason == 'no_signal' and 'no_signal' or record.state == 'reserved' and 'lease_lost' or 'already', reason)
  discard(id)
  if reason == 'no_signal' or reason == 'detached' then -- the task gets no other ticket
    call('HINCRBY', STATE, 'untrained', 1)
  else
    roll_again(record, reason == 'failed')
  end
  wake_workers()
  wake_learner()
end

-- Quarantine is bounded: the oldest report is deleted first, and a payload that does not fit is not kept.
local function report(id, record, reason, payload)
  local size = #payload
  call('HSET', QUARANTINE, id, cjson.encode({ ticket = id, worker = record.worker, environment = record.environment,
    task = record.task, reason = reason, time = math.floor(now_ms() / 1000), size = size }))
  if size > 0 and get('quarantine_bytes', 0) + size <= QUARANTINE_BYTES then
    call('HSET', QUARANTINE_PAYLOADS, id, payload)
    call('HINCRBY', STATE, 'quarantine_bytes', size)
  end
end

local function forget_report(id)
  local size = call('HSTRLEN', QUARANTINE_PAYLOADS, id)
  call('HDEL', QUARANTINE_PAYLOADS, id)
  if size > 0 then call('HINCRBY', STATE, 'quarantine_bytes', -size) end
  return call('HDEL', QUARANTINE, id)
end

local function quarantine(id, record, reason, payload)
  call('HINCRBY', STATE, 'quarantined', 1)
  record_event('quarantined', id, record)
  close(id, record, 'quarantined', 'quarantined')
  discard(id)
  if call('HLEN', QUARANTINE) >= QUARANTINE_KEPT then
    local reports = call('HKEYS', QUARANTINE)
    table.sort(reports)
    forget_report(reports[1])
  end
  report(id, record, reason, payload)
  roll_again(record, true)
  wake_workers()
  wake_learner()
end

-- A server that is older than the checkpoint gets the tasks to roll again from it; until then no script adds any.
local function is_frozen()
  return call('HGET', STATE, 'recovering') == '2'
end

local function collect_lost_leases()
  if is_frozen() then return end
  -- Cut leases to their full length: after the clock was set back, a dead worker's lease would last until the clock caught up.
  local latest = now_ms() + get('lease_ms', 0)
  for _, id in ipairs(call('ZRANGEBYSCORE', LEASES, '(' .. latest, '+inf', 'LIMIT', 0, AT_ONCE)) do call('ZADD', LEASES, latest, id) end
  for _, id in ipairs(call('ZRANGEBYSCORE', LEASES, '-inf', now_ms(), 'LIMIT', 0, AT_ONCE)) do
    local record = read(id)
    if record then drop(id, record, 'lease_lost') else call('ZREM', LEASES, id) end
  end
end

-- Weights trained on these steps are live: free their slots, and make groups that may train again ready.
local function release(step)
  local released = get('released', -1)
  if step <= released then return end
  call('HSET', STATE, 'released', step)
  local max_uses = get('max_uses', 1)
  if max_uses > 1 then
    for _, id in ipairs(call('ZRANGEBYSCORE', TAKEN, '(' .. released, step)) do
      local record = read(id)
      if record and #record.steps < max_uses then
        leave(id, record)
        enter(id, record, 'again', record.oldest)
      end
    end
    wake_learner()
  end
  wake_workers()
end
