-- number of messages to keep, the message
call('XDEL', TOPIC, '0-0') -- a full server accepts writes that follow a deletion
call('XADD', TOPIC, 'MAXLEN', '~', ARGV[1], '*', 'message', ARGV[2])
