-- how many messages are kept, the message
call('XDEL', TOPIC, '0-0') -- a full server lets what follows a deletion pass
call('XADD', TOPIC, 'MAXLEN', '~', ARGV[1], '*', 'message', ARGV[2])
