-- fence, group and weight in turn
for index = 2, #ARGV, 2 do
  local id, weight = ARGV[index], tonumber(ARGV[index + 1])
  local record = read(id)
  if record and record.state ~= 'kept' then
    local before = weight_of(id)
    call('HSET', WEIGHTS, id, ARGV[index + 1])
    local draw = tonumber(call('ZSCORE', LOTTERY, id))
    if draw then -- exponential waits are memoryless, so the rest of the wait is rescaled
      local time = get('lottery_time', 0)
      call('ZADD', LOTTERY, string.format('%.17g', time + (draw - time) * before / weight_of(id)), id)
    end
  end
end
