// The agent of Go's lock libraries: takes turns with one lock, and prints when it asked, was inside and left.
//
//	interop redsync|redislock ADDRESS KEY TTL_MS TURNS PAUSE_MS HOLD_MS
package main

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
)

func now() float64 { return float64(time.Now().UnixNano()) / 1e9 }

func number(word string) int {
	value, err := strconv.Atoi(word)
	if err != nil {
		panic(err)
	}
	return value
}

func main() {
	library, address, key := os.Args[1], os.Args[2], os.Args[3]
	ttl := time.Duration(number(os.Args[4])) * time.Millisecond
	turns := number(os.Args[5])
	pause := time.Duration(number(os.Args[6])) * time.Millisecond
	hold := time.Duration(number(os.Args[7])) * time.Millisecond
	ctx := context.Background()
	client := redis.NewClient(&redis.Options{Addr: address})
	pool := redsync.New(goredis.NewPool(client))
	locker := redislock.New(client)
	for turn := 0; turn < turns; turn++ {
		asked := now()
		var release func() error
		switch library {
		case "redsync":
			mutex := pool.NewMutex(key, redsync.WithExpiry(ttl), redsync.WithTries(1<<30))
			if err := mutex.Lock(); err != nil {
				panic(err)
			}
			release = func() error { _, err := mutex.Unlock(); return err }
		case "redislock":
			options := &redislock.Options{RetryStrategy: redislock.LinearBackoff(100 * time.Millisecond)}
			waiting, cancel := context.WithTimeout(ctx, time.Hour)
			lock, err := locker.Obtain(waiting, key, ttl, options)
			cancel()
			if err != nil {
				panic(err)
			}
			release = func() error { return lock.Release(ctx) }
		default:
			panic("no such library: " + library)
		}
		begun := now()
		fmt.Printf("in %.6f %.6f\n", asked, begun)
		time.Sleep(hold)
		ended := now()
		if err := release(); err != nil {
			panic(err)
		}
		fmt.Printf("out %.6f\n", ended)
		time.Sleep(pause)
	}
}
