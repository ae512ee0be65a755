-- What every script of the buffer starts with. A ticket that has not ended has a record:
-- task index, attempt, failures, ticket version, oldest token's version, version at commit, version at take, worker.
local STATE, DROPPED, LEASES, RESERVED, READY, TAKEN = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local RECORDS, PAYLOADS, REDO, ENDED = KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local QUARANTINE, REQUESTS, VERSIONS = KEYS[11], KEYS[12], KEYS[13]
local ON_SLOTS, ON_READY, ON_LEARNER = KEYS[14], KEYS[15], KEYS[16]

local COLLECTED_AT_ONCE = 64
local ENDED_REMEMBERED = 10000

local function get(field, default)
  return tonumber(redis.call('HGET', STATE, field) or default)
end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- A full server refuses a script's first write if it could take memory, but not what follows a deletion.
-- Whatever frees memory in the end, or keeps a lease alive, must go through.
local function even_when_full()
  redis.call('HDEL', STATE, '')
end

local function fence_lost(fence)
  local current = redis.call('HGET', STATE, 'fence')
  if fence ~= current then return redis.error_reply('FENCELOST ' .. (current or '0')) end
end

local function ticket_number(id)
  return tonumber(string.sub(id, 2))
end

local function read(id)
  local text = redis.call('HGET', RECORDS, id)
  if not text then return nil end
  local task, attempt, failures, version, oldest, committed, taken, worker =
    string.match(text, '^(%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (.*)$')
  return {
    task = tonumber(task), attempt = tonumber(attempt), failures = tonumber(failures), version = tonumber(version),
    oldest = tonumber(oldest), committed = tonumber(committed), taken = tonumber(taken), worker = worker,
  }
end

local function write(id, record)
  redis.call('HSET', RECORDS, id, string.format('%d %d %d %d %d %d %d %s', record.task, record.attempt, record.failures,
    record.version, record.oldest, record.committed, record.taken, record.worker))
end

-- The record of a ticket that this worker may still commit.
local function held(id, worker)
  local record = read(id)
  if record and record.committed < 0 and record.worker == worker then return record end
end

local function answer_again(id)
  local record = read(id)
  if record then return record.committed < 0 and 'lease_lost' or 'already' end
  return redis.call('HGET', ENDED, id) or 'lease_lost'
end

local function wake_workers()
  redis.call('PUBLISH', ON_SLOTS, '')
end

-- A learner that waits has left word how many groups it misses; while nobody waits, nobody is called.
local function wake_learner()
  local wanted = redis.call('HGET', STATE, 'wanted')
  if wanted and redis.call('ZCARD', READY) >= tonumber(wanted) then redis.call('PUBLISH', ON_READY, '') end
end

local function finish(id, answer)
  redis.call('ZREM', LEASES, id)
  redis.call('ZREM', RESERVED, id)
  redis.call('ZREM', READY, id)
  redis.call('ZREM', TAKEN, id)
  local size = redis.call('HSTRLEN', PAYLOADS, id)
  if size > 0 then
    redis.call('HDEL', PAYLOADS, id)
    redis.call('HINCRBY', STATE, 'bytes', -size)
  end
  redis.call('HDEL', RECORDS, id)
  -- reserve.lua forgets the ticket that is this many numbers behind; one that ends even later is not remembered at all.
  if ticket_number(id) > get('next_ticket', 0) - ENDED_REMEMBERED then redis.call('HSET', ENDED, id, answer) end
end

local function spend(id)
  redis.call('HINCRBY', STATE, 'spent', 1)
  finish(id, 'already')
end

local function roll_again(record, failed)
  local failures = record.failures + (failed and 1 or 0)
  if failed and failures >= get('max_attempts', 1) then return end
  redis.call('RPUSH', REDO, string.format('%d %d %d', record.task, record.attempt + 1, failures))
end

local function drop(id, record, reason)
  redis.call('HINCRBY', DROPPED, reason, 1)
  finish(id, reason == 'no_signal' and 'no_signal' or record.committed >= 0 and 'already' or 'lease_lost')
  if reason ~= 'no_signal' then roll_again(record, reason == 'failed') end
  wake_workers()
  wake_learner()
end

local QUARANTINE_REPORTS = 100
local function quarantine(id, record, reason, head)
  redis.call('HINCRBY', STATE, 'quarantined', 1)
  finish(id, 'quarantined')
  redis.call('LPUSH', QUARANTINE, cjson.encode({ ticket = id, worker = record.worker, task = record.task, reason = reason, head = head }))
  redis.call('LTRIM', QUARANTINE, 0, QUARANTINE_REPORTS - 1)
  roll_again(record, true)
  wake_workers()
  wake_learner()
end

local function collect_lost_leases()
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', now_ms(), 'LIMIT', 0, COLLECTED_AT_ONCE)) do
    drop(id, read(id), 'lease_lost')
  end
end

local function slots_used()
  local released = get('released', -1)
  return redis.call('ZCARD', RESERVED) + redis.call('ZCARD', READY) + redis.call('ZCOUNT', TAKEN, released + 1, '+inf')
end
