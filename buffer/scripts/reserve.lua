-- worker, request, version, count, 1 if the worker waits -> ticket id, task index, version, attempt, mix; and so on
local worker, request, version, count, waits = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5] == '1'
local SILENT_MS = 2500 -- a waiting worker asks at least once a second

local _, mix = latest_change() -- read first: it may be refused while a Cluster moves the run
local function describe(first, length)
  local tickets = {}
  for offset = 0, math.min(length, ENDED_REMEMBERED) - 1 do
    local id = ticket_id(first + offset)
    local record = held(id, worker)
    if record then
      for _, value in ipairs({ id, record.task, record.version, record.attempt, mix }) do tickets[#tickets + 1] = value end
    end
  end
  return tickets
end

-- The reply to this request was lost: return the same tickets.
local last, first, length = string.match(call('HGET', REQUESTS, worker) or '', '^(%S+) (%d+) (%d+)$')
if last == request then
  local again = describe(tonumber(first), tonumber(length))
  if #again > 0 then return again end
end

-- A full server refuses this write, and with it the script: a reservation must not take the last memory.
call('HSET', STATE, 'full', 0)
collect_lost_leases()

local live = get('live', -1)
if live < 0 or version < live or call('HEXISTS', STATE, 'recovering') == 1 then return {} end

-- First come, first served, and at most an equal share while others wait (buffer/rules/admission.py).
local free, now = free_tickets(), now_ms()
for _, silent in ipairs(call('ZRANGEBYSCORE', ASKED, '-inf', now - SILENT_MS, 'LIMIT', 0, AT_ONCE)) do
  call('ZREM', ASKED, silent)
  call('ZREM', WAITING, silent)
end
local ahead = call('ZRANK', WAITING, worker) or call('ZCARD', WAITING)
local queue = call('ZCARD', WAITING) + (call('ZSCORE', WAITING, worker) and 0 or 1)
count = math.max(0, math.min(count, free - ahead, math.ceil(free / queue)))
if count == 0 then
  if waits then
    if not call('ZSCORE', WAITING, worker) then call('ZADD', WAITING, call('HINCRBY', STATE, 'turns', 1), worker) end
    call('ZADD', ASKED, now, worker)
  end
  return {}
end
call('ZREM', WAITING, worker)
call('ZREM', ASKED, worker)

local start, expires = get('next_ticket', 0), now + get('lease_ms', 0)
if not (start >= 0 and start < 2 ^ 52) then error('next_ticket is not ours') end -- else the loop might not end
for number = start, start + count - 1 do
  local id = ticket_id(number)
  local task, attempt, failures = string.match(call('LPOP', REDO) or '', '^(%d+) (%d+) (%d+)$')
  if not task then task, attempt, failures = call('HINCRBY', STATE, 'next_task', 1) - 1, 1, 0 end
  local record = {
    task = task, attempt = attempt, failures = failures, version = live, oldest = -1, committed = -1, taken = -1,
    tokens = 0, steps = {}, worker = worker, environment = '',
  }
  enter(id, record, 'reserved', live)
  call('ZADD', LEASES, expires, id)
  if number >= ENDED_REMEMBERED then call('HDEL', ENDED, ticket_id(number - ENDED_REMEMBERED)) end
end
call('HINCRBY', STATE, 'next_ticket', count)
call('HINCRBY', STATE, 'issued', count)
call('HSET', REQUESTS, worker, string.format('%s %d %d', request, start, count))
call('EXPIRE', REQUESTS, 3600)
return describe(start, count)
