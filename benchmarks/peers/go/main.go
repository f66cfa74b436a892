// Locks of Go in the benchmarks: does what lines on its standard input say, and answers with figures and "ok".
package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidislock"
)

const (
	ttl = 30 * time.Second
	// What redislock waits between two tries; its documentation has this example, and it has no default.
	pause = 100 * time.Millisecond
)

// release gives a lock back.
type release func()

// library takes a lock by its name, and waits for it.
type library struct {
	take  func(name string) release
	close func()
}

var (
	opened library
	taken  = map[string]release{}
	out    = bufio.NewWriter(os.Stdout)
)

func main() {
	orders := bufio.NewScanner(os.Stdin)
	orders.Buffer(nil, 1<<20)
	for orders.Scan() {
		obey(strings.Fields(orders.Text()))
		fmt.Fprintln(out, "ok")
		out.Flush()
	}
}

// must ends the program with an answer that says why.
func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stdout, err)
		os.Exit(1)
	}
}

func number(word string) int {
	value, err := strconv.Atoi(word)
	must(err)
	return value
}

func obey(words []string) {
	switch words[0] {
	case "open":
		opened = map[string]func(string) library{
			"rueidislock": openRueidislock, "redsync": openRedsync, "redislock": openRedislock,
		}[words[1]](words[2])
	case "close":
		opened.close()
	case "turns":
		for range number(words[2]) {
			opened.take(words[1])()
		}
	case "drain":
		drain(number(words[1]), time.Duration(number(words[2]))*time.Millisecond, words[3:])
	case "take":
		taken[words[1]] = opened.take(words[1])
		fmt.Fprintf(out, "%.9f\n", now())
	case "leave":
		left := now()
		taken[words[1]]()
		fmt.Fprintf(out, "%.9f\n", left)
	default:
		must(fmt.Errorf("unknown: %v", words))
	}
}

// now returns the seconds of the clock that Python calls monotonic; Go's own begins with the program.
func now() float64 {
	var then syscall.Timespec
	_, _, failed := syscall.RawSyscall(syscall.SYS_CLOCK_GETTIME, 1, uintptr(unsafe.Pointer(&then)), 0)
	if failed != 0 {
		must(failed)
	}
	return float64(then.Sec) + float64(then.Nsec)/1e9
}

func drain(turns int, hold time.Duration, names []string) {
	var all sync.WaitGroup
	var mutex sync.Mutex
	for contender, name := range names {
		all.Go(func() {
			for range turns {
				asked := now()
				leave := opened.take(name)
				inside := now()
				time.Sleep(hold)
				left := now()
				leave()
				mutex.Lock()
				fmt.Fprintf(out, "%.9f %.9f %.9f %d\n", asked, inside, left, contender)
				mutex.Unlock()
			}
		})
	}
	all.Wait()
}

func openRueidislock(address string) library {
	locker, err := rueidislock.NewLocker(rueidislock.LockerOption{
		ClientOption: rueidis.ClientOption{InitAddress: []string{address}},
		// One server. NoLoopTracking is left alone: with it, one process in twelve waited for ever for a free lock.
		KeyMajority: 1,
	})
	must(err)
	take := func(name string) release {
		_, cancel, err := locker.WithContext(context.Background(), name)
		must(err)
		return release(cancel)
	}
	return library{take, locker.Close}
}

func openRedsync(address string) library {
	client := redis.NewClient(&redis.Options{Addr: address})
	locks := redsync.New(goredis.NewPool(client))
	take := func(name string) release {
		// Its pauses are the default: 50 to 250 ms; only the number of tries is not, so that nobody gives up.
		mutex := locks.NewMutex("redsync:"+name, redsync.WithExpiry(ttl), redsync.WithTries(1_000_000))
		must(mutex.Lock())
		return func() {
			_, err := mutex.Unlock()
			must(err)
		}
	}
	return library{take, func() { must(client.Close()) }}
}

func openRedislock(address string) library {
	client := redis.NewClient(&redis.Options{Addr: address})
	locks := redislock.New(client)
	background := context.Background()
	take := func(name string) release {
		for {
			// It gives up after a ttl.
			lock, err := locks.Obtain(background, "redislock:"+name, ttl, &redislock.Options{
				RetryStrategy: redislock.LinearBackoff(pause),
			})
			if errors.Is(err, redislock.ErrNotObtained) {
				continue
			}
			must(err)
			return func() { must(lock.Release(background)) }
		}
	}
	return library{take, func() { must(client.Close()) }}
}
